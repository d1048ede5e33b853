// Kernels that run for 5 s each: a checkpoint has to wait for one.
#include "check.h"

__global__ void spin(std::uint32_t* values, std::uint64_t nanoseconds, std::uint32_t by) {
  std::uint64_t begin = 0, now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
  values[threadIdx.x] = values[threadIdx.x] * 1664525u + by;
}

int main(int argc, char** argv) {
  Run run(argc, argv);
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, 4 << 20));
  CHECK(cudaMemset(values, 3, 4 << 20));
  const int turns = run.steps() / 80;
  for (int step = 0; step < turns; step++) {
    spin<<<1, 64>>>(values, 5'000'000'000ULL, step);
    std::printf("step %d\n", step);
    std::fflush(stdout);
    CHECK(cudaDeviceSynchronize());
  }
  run.add_device(values, 64);
  return run.finish();
}
