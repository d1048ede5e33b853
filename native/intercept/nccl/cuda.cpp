#include "cuda.h"

#include <dlfcn.h>

#include <atomic>

namespace moorage::nccl::cuda {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr int kRelaxed = 2;

template <typename Function>
class Entry {
 public:
  explicit constexpr Entry(const char* name) : name_(name) {}

  // Null while there is no driver in this process.
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

constinit Entry<int(void*, int*)> is_capturing("cuStreamIsCapturing");
constinit Entry<int(void*)> query("cuStreamQuery");
constinit Entry<int(void**)> get_current("cuCtxGetCurrent");
constinit Entry<int(void*)> set_current("cuCtxSetCurrent");
constinit Entry<int(void**, int)> retain_primary("cuDevicePrimaryCtxRetain");
constinit Entry<int(int*)> exchange_mode("cuThreadExchangeStreamCaptureMode");

}  // namespace

bool capturing(void* stream) {
  if (stream == nullptr) return false;  // the legacy stream cannot be captured
  auto* ask = is_capturing.get();
  int status = 0;
  return ask != nullptr && ask(stream, &status) == kSuccess && status != 0;
}

Work work(void* stream, void* context) {
  auto* ask = query.get();
  if (ask == nullptr || capturing(stream)) return Work::Done;
  if (current_context() != context) set_context(context);
  return ask(stream) == kNotReady ? Work::Busy : Work::Done;
}

void* current_context() {
  auto* ask = get_current.get();
  void* context = nullptr;
  return ask != nullptr && ask(&context) == kSuccess ? context : nullptr;
}

void set_context(void* context) {
  if (auto* tell = set_current.get(); tell != nullptr && context != nullptr) tell(context);
}

void* primary_context(int device) {
  auto* ask = retain_primary.get();
  void* context = nullptr;
  return ask != nullptr && ask(&context, device) == kSuccess ? context : nullptr;
}

void be_discreet() {
  int mode = kRelaxed;
  if (auto* exchange = exchange_mode.get()) exchange(&mode);
}

}  // namespace moorage::nccl::cuda
