// cuGetProcAddress, every version and stream flag: always a function of the proxy, and the one that the driver means.
#include <string>

#include "check.h"

namespace {

constexpr cuuint64_t kDefault = CU_GET_PROC_ADDRESS_DEFAULT;
constexpr cuuint64_t kLegacy = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
constexpr cuuint64_t kPerThread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;

struct Expected {
  const char* base;
  int version;
  cuuint64_t flags;
  const char* symbol;
};

// Written by hand from CUDA's documentation, not from what is generated.
constexpr Expected kExpected[] = {
    {"cuMemAlloc", 2000, kDefault, "cuMemAlloc"},
    {"cuMemAlloc", 3020, kDefault, "cuMemAlloc_v2"},
    {"cuMemAlloc", 13000, kDefault, "cuMemAlloc_v2"},
    {"cuMemAlloc", 13000, kPerThread, "cuMemAlloc_v2"},
    {"cuMemcpyHtoD", 3020, kLegacy, "cuMemcpyHtoD_v2"},
    {"cuMemcpyHtoD", 6050, kPerThread, "cuMemcpyHtoD_v2"},
    {"cuMemcpyHtoD", 7000, kPerThread, "cuMemcpyHtoD_v2_ptds"},
    {"cuMemcpyHtoD", 12000, kLegacy, "cuMemcpyHtoD_v2"},
    {"cuStreamSynchronize", 12000, kDefault, "cuStreamSynchronize"},
    {"cuStreamSynchronize", 12000, kPerThread, "cuStreamSynchronize_ptsz"},
    {"cuStreamGetCaptureInfo", 10010, kDefault, "cuStreamGetCaptureInfo"},
    {"cuStreamGetCaptureInfo", 11030, kDefault, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamGetCaptureInfo", 12020, kPerThread, "cuStreamGetCaptureInfo_v2_ptsz"},
    {"cuStreamGetCaptureInfo", 12030, kPerThread, "cuStreamGetCaptureInfo_v3_ptsz"},
    {"cuCtxCreate", 3020, kDefault, "cuCtxCreate_v2"},
    {"cuCtxCreate", 11040, kDefault, "cuCtxCreate_v3"},
    {"cuCtxCreate", 12050, kDefault, "cuCtxCreate_v4"},
    {"cuGetProcAddress", 11030, kDefault, "cuGetProcAddress"},
    {"cuGetProcAddress", 12000, kDefault, "cuGetProcAddress_v2"},
    {"cuLaunchKernel", 4000, kDefault, "cuLaunchKernel"},
    {"cuLaunchKernel", 7000, kPerThread, "cuLaunchKernel_ptsz"},
    {"cuGraphInstantiate", 12000, kDefault, "cuGraphInstantiateWithFlags"},
    // The driver answers an address of its own for this one, which no symbol has.
    {"cuStreamQuery", 12000, kDefault, "cuStreamQuery"},
};

void is_symbol(const Expected& expected, void* found, void* proxy) {
  if (found != dlsym(proxy, expected.symbol)) {
    Dl_info info{};
    dladdr(found, &info);
    std::fprintf(stderr, "%s at %d with flags %d: %s of %s, not %s\n", expected.base, expected.version,
                 static_cast<int>(expected.flags), info.dli_sname, info.dli_fname, expected.symbol);
    std::_Exit(1);
  }
  CHECK(std::strcmp(file_of(found), PROXY) == 0);
}

}  // namespace

int main() {
  OK(cuInit(0));
  void* proxy = dlopen(PROXY, RTLD_NOW);
  for (const Expected& expected : kExpected) {
    void* found = nullptr;
    auto status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (std::strcmp(expected.base, "cuGraphInstantiate") == 0) {
      // Not in the fake driver's table either, which has one line for each version that can be told apart.
      ANSWERS(CUDA_SUCCESS, cuGetProcAddress_v2(expected.base, &found, expected.version, expected.flags, &status));
      continue;
    }
    OK(cuGetProcAddress_v2(expected.base, &found, expected.version, expected.flags, &status));
    CHECK(status == CU_GET_PROC_ADDRESS_SUCCESS);
    is_symbol(expected, found, proxy);
    found = nullptr;
    OK(cuGetProcAddress(expected.base, &found, expected.version, expected.flags));
    is_symbol(expected, found, proxy);
  }

  // Errors and absences are the driver's own.
  void* found = &found;
  auto status = CU_GET_PROC_ADDRESS_SUCCESS;
  OK(cuGetProcAddress_v2("cuNoSuchThing", &found, 12000, kDefault, &status));
  CHECK(found == nullptr && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  OK(cuGetProcAddress_v2("cuMemCreate", &found, 9000, kDefault, &status));
  CHECK(found == nullptr && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2(nullptr, &found, 12000, kDefault, nullptr));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2("cuInit", nullptr, 12000, kDefault, nullptr));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2("cuInit", &found, 12000, 77, nullptr));
  ANSWERS(CUDA_ERROR_NOT_FOUND, cuGetProcAddress("cuNoSuchThing", &found, 12000, kDefault));

  // A function that no header has passes as it is.
  OK(cuGetProcAddress_v2("cuFakeFuture", &found, 13000, kDefault, nullptr));
  CHECK(std::strcmp(file_of(found), REAL) == 0);

  // The function that was answered works: the per-thread variant runs on the thread's own stream.
  begin();
  OK(cuGetProcAddress_v2("cuStreamSynchronize", &found, 12000, kPerThread, nullptr));
  OK(reinterpret_cast<decltype(&cuStreamSynchronize)>(found)(nullptr));
  CHECK(std::strcmp(beyond<const char*()>("fakeLastCall")(), "cuStreamSynchronize") == 0);
}
