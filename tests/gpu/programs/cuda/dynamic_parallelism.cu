// Kernels that launch kernels.
#include "check.h"

__global__ void child(std::uint32_t* values, std::size_t count, std::uint32_t by) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    values[i] = values[i] * 1664525u + 1013904223u + by;
  }
}

__global__ void parent(std::uint32_t* values, std::size_t count, std::uint32_t by) {
  if (threadIdx.x < 4) child<<<8, 128>>>(values + threadIdx.x * count / 4, count / 4, by + threadIdx.x);
}

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr std::size_t kCount = 1 << 20;
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, kCount * 4));
  CHECK(cudaMemset(values, 4, kCount * 4));
  for (int step = 0; step < run.steps(); step++) {
    parent<<<1, 32>>>(values, kCount, step);
    run.step(step);
  }
  run.add_device(values, kCount);
  return run.finish();
}
