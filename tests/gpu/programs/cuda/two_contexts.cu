// The primary context and one that the program made itself, with memory and a thread in each.
#include <cuda.h>

#include <thread>

#include "check.h"

static void work(CUcontext context, std::uint32_t* values, std::size_t count, int step) {
  if (context != nullptr) REQUIRE(cuCtxSetCurrent(context) == CUDA_SUCCESS);
  advance<<<64, 256>>>(values, count, step);
  CHECK(cudaDeviceSynchronize());
}

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr std::size_t kCount = 1 << 20;
  std::uint32_t* one = nullptr;
  CHECK(cudaMalloc(&one, kCount * 4));
  CHECK(cudaMemset(one, 1, kCount * 4));
  CUcontext primary = nullptr, own = nullptr;
  REQUIRE(cuCtxGetCurrent(&primary) == CUDA_SUCCESS);
#if CUDA_VERSION >= 13000
  REQUIRE(cuCtxCreate(&own, nullptr, 0, 0) == CUDA_SUCCESS);
#else
  REQUIRE(cuCtxCreate(&own, 0, 0) == CUDA_SUCCESS);
#endif
  CUdeviceptr address = 0;
  REQUIRE(cuMemAlloc(&address, kCount * 4) == CUDA_SUCCESS);
  REQUIRE(cuMemsetD8(address, 6, kCount * 4) == CUDA_SUCCESS);
  auto* other = reinterpret_cast<std::uint32_t*>(address);
  REQUIRE(cuCtxSetCurrent(primary) == CUDA_SUCCESS);
  for (int step = 0; step < run.steps(); step++) {
    std::thread first([&] { work(primary, one, kCount, step); });
    std::thread second([&] { work(own, other, kCount, step + 1); });
    first.join();
    second.join();
    run.step(step);
  }
  run.add_device(one, kCount);
  REQUIRE(cuCtxSetCurrent(own) == CUDA_SUCCESS);
  run.add_device(other, kCount);
  return run.finish();
}
