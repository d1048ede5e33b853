// Host memory that kernels read and write in place, allocated and registered.
#include <sys/mman.h>

#include "check.h"

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr std::size_t kCount = 1 << 20;
  std::uint32_t* allocated = nullptr;
  CHECK(cudaHostAlloc(&allocated, kCount * 4, cudaHostAllocMapped | cudaHostAllocPortable));
  auto* registered = static_cast<std::uint32_t*>(
      mmap(nullptr, kCount * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(cudaHostRegister(registered, kCount * 4, cudaHostRegisterMapped));
  std::uint32_t *one = nullptr, *other = nullptr;
  CHECK(cudaHostGetDevicePointer(&one, allocated, 0));
  CHECK(cudaHostGetDevicePointer(&other, registered, 0));
  for (std::size_t i = 0; i < kCount; i++) allocated[i] = registered[i] = i;
  for (int step = 0; step < run.steps(); step++) {
    advance<<<64, 256>>>(one, kCount, step);
    advance<<<64, 256>>>(other, kCount, 7 * step);
    if (step % 10 == 0) {
      CHECK(cudaDeviceSynchronize());
      registered[step % kCount] += allocated[(3 * step) % kCount];
    }
    run.step(step);
  }
  CHECK(cudaDeviceSynchronize());
  for (std::size_t i = 0; i < kCount; i += 97) run.add(allocated[i] ^ registered[i]);
  return run.finish();
}
