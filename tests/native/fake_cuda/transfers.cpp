// Copies, fills and host memory of the fake driver.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "fake.h"

namespace fake {
namespace {

CUresult copy(std::uintptr_t to, std::uintptr_t from, std::size_t size) {
  if (const CUresult bad = usable()) return bad;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  for (const std::uintptr_t address : {to, from}) {
    if (!accessible(address, size, current()->device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  if (const CUresult bad = submit(nullptr, [=] { std::memcpy(translate(to), translate(from), size); })) return bad;
  stream_of(nullptr)->drain();
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace fake

using namespace fake;

FAKE CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  note("cuMemcpyHtoD_v2");
  return copy(to, reinterpret_cast<std::uintptr_t>(from), size);
}
FAKE CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  note("cuMemcpyDtoH_v2");
  return copy(reinterpret_cast<std::uintptr_t>(to), from, size);
}
// As seen with the real driver: mappings of two devices need access, or contexts that are named.
FAKE CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
  note("cuMemcpyDtoD_v2");
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  for (const std::uintptr_t address : {to, from}) {
    if (!accessible(address, size, current()->device)) return CUDA_ERROR_INVALID_VALUE;
  }
  return copy(to, from, size);
}
FAKE CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size) {
  note("cuMemcpyPeer");
  if (const CUresult bad = usable()) return bad;
  if (!accessible(to, size, reinterpret_cast<Context*>(there)->device) ||
      !accessible(from, size, reinterpret_cast<Context*>(here)->device)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(translate(to), translate(from), size);
  return CUDA_SUCCESS;
}
FAKE CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
  note("cuMemsetD32_v2");
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!accessible(to, count * 4, current()->device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (const CUresult bad = submit(nullptr, [=] {
        auto* words = static_cast<unsigned*>(translate(to));
        std::fill(words, words + count, value);
      })) {
    return bad;
  }
  stream_of(nullptr)->drain();
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemHostAlloc(void** pointer, size_t size, unsigned) {
  *pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return usable();
}
FAKE CUresult cuMemFreeHost(void* pointer) {
  munmap(pointer, 1);
  return usable();
}
