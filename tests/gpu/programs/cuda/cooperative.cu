// A cooperative launch whose blocks wait for each other.
#include <cooperative_groups.h>

#include "check.h"

__global__ void rounds(std::uint32_t* values, std::size_t count, std::uint32_t by) {
  auto grid = cooperative_groups::this_grid();
  const std::size_t self = grid.thread_rank();
  for (int turn = 0; turn < 8; turn++) {
    std::uint32_t sum = 0;
    for (std::size_t i = self; i < count; i += grid.size()) sum += values[(i * 7 + turn) % count];
    grid.sync();
    for (std::size_t i = self; i < count; i += grid.size()) values[i] = values[i] * 1664525u + sum + by;
    grid.sync();
  }
}

int main(int argc, char** argv) {
  Run run(argc, argv);
  std::size_t count = 1 << 20;
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, count * 4));
  CHECK(cudaMemset(values, 2, count * 4));
  int blocks = 0;
  cudaDeviceProp properties{};
  CHECK(cudaGetDeviceProperties(&properties, 0));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, rounds, 256, 0));
  for (int step = 0; step < run.steps(); step++) {
    std::uint32_t by = step;
    void* arguments[] = {&values, &count, &by};
    CHECK(cudaLaunchCooperativeKernel(rounds, dim3(properties.multiProcessorCount), dim3(256), arguments, 0, nullptr));
    run.step(step);
  }
  REQUIRE(blocks > 0);
  run.add_device(values, count);
  return run.finish();
}
