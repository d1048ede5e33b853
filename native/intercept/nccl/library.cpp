#include "library.h"

#include <dlfcn.h>
#include <pthread.h>

#include <climits>
#include <cstdio>
#include <cstdlib>

#include "control.h"
#include "real.h"

#ifndef MOORAGE_REAL_NCCL_ROOT
#define MOORAGE_REAL_NCCL_ROOT "/.moorage-nccl"
#endif

extern "C" __attribute__((visibility("default"))) const char moorage_nccl_proxy;
const char moorage_nccl_proxy = 1;

namespace moorage::nccl {

void* real::table[real::kFunctions] = {};

namespace library {
namespace {

std::string& found() {
  static auto* const one = new std::string;
  return *one;
}

std::string looked_for() {
  const char* told = std::getenv("MOORAGE_REAL_LIBNCCL");
  if (told != nullptr && *told != '\0') return told;
  Dl_info self{};
  char whole[PATH_MAX] = "";
  if (dladdr(reinterpret_cast<const void*>(&looked_for), &self) == 0 || self.dli_fname == nullptr) return "";
  if (realpath(self.dli_fname, whole) == nullptr) return "";
  return std::string(MOORAGE_REAL_NCCL_ROOT) + whole;
}

// Not RTLD_DEEPBIND: a job may have an allocator of its own. What NCCL calls of itself comes here and passes (Inside).
__attribute__((constructor)) void load() {
  found() = looked_for();
  pthread_atfork(control::before_fork, control::after_fork_in_parent, control::after_fork_in_child);
  void* handle = dlopen(found().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::fprintf(stderr, "moorage: NCCL's own library cannot be opened: %s\n", dlerror());
    return;
  }
  for (std::size_t i = 0; i < real::kFunctions; ++i) real::table[i] = dlsym(handle, real::kNames[i]);
}

}  // namespace

const std::string& path() { return found(); }

int version() {
  int code = 0;
  return real::ncclGetVersion(&code) == kSuccess ? code : 0;
}

}  // namespace library
}  // namespace moorage::nccl
