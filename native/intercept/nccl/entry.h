// A function of the CUDA driver, found in the libcuda.so.1 that the process has loaded.
#pragma once

#include <dlfcn.h>

#include <atomic>

namespace moorage::nccl::cuda {

template <typename Function>
class Entry {
 public:
  explicit constexpr Entry(const char* name) : name_(name) {}

  // Null while there is no driver in this process, or when it has no such function.
  Function* get() {
    void* known = found_.load(std::memory_order_acquire);
    if (known == nullptr) [[unlikely]] {
      void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
      if (driver == nullptr) return nullptr;
      known = dlsym(driver, name_);
      dlclose(driver);
      found_.store(known, std::memory_order_release);
    }
    return reinterpret_cast<Function*>(known);
  }

 private:
  const char* name_;
  std::atomic<void*> found_{nullptr};
};

}  // namespace moorage::nccl::cuda
