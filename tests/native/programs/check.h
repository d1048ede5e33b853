// What the test programs share: checks that say where they failed, and the CUDA API with all versioned names.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);        \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (false)

#define ANSWERS(expected, call)                                                           \
  do {                                                                                    \
    const int got_ = static_cast<int>(call);                                              \
    if (got_ != static_cast<int>(expected)) {                                             \
      std::fprintf(stderr, "%s:%d: %s answered %d\n", __FILE__, __LINE__, #call, got_);   \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (false)

#define OK(call) ANSWERS(CUDA_SUCCESS, call)

// A function of the fake driver that no header declares, found as any program would: by dlsym on libcuda.so.1.
template <typename Function>
Function* beyond(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(library != nullptr);
  void* found = dlsym(library, name);
  CHECK(found != nullptr);
  return reinterpret_cast<Function*>(found);
}

inline const char* file_of(const void* address) {
  Dl_info info{};
  CHECK(dladdr(address, &info) != 0);
  return info.dli_fname;
}

inline CUcontext begin(int device = 0) {
  CUcontext context = nullptr;
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
  return context;
}

inline CUfunction kernel(const char* name) {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  OK(cuModuleLoadData(&module, ""));
  OK(cuModuleGetFunction(&function, module, name));
  return function;
}

inline CUresult launch(const char* name, CUstream stream, void* a, void* b = nullptr, void* c = nullptr) {
  void* parameters[] = {a, b, c};
  return cuLaunchKernel(kernel(name), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
}
