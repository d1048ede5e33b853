// One process with both GPUs that copies between them and never asks for peer access.
#include "../cuda/check.h"

constexpr std::size_t kCount = 4 << 20;

int main(int argc, char** argv) {
  Run run(argc, argv);
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  REQUIRE(devices >= 2);
  std::uint32_t* values[2] = {};
  cudaStream_t streams[2] = {};
  for (int device = 0; device < 2; device++) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaMalloc(&values[device], kCount * 4));
    CHECK(cudaMemset(values[device], device + 1, kCount * 4));
    CHECK(cudaStreamCreate(&streams[device]));
    CHECK(cudaDeviceSynchronize());
  }
  for (int step = 0; step < run.steps(); step++) {
    const int from = step % 2;
    CHECK(cudaSetDevice(from));
    advance<<<64, 256, 0, streams[from]>>>(values[from], kCount, step);
    CHECK(cudaMemcpyPeerAsync(values[1 - from], 1 - from, values[from], from, kCount * 2, streams[from]));
    CHECK(cudaStreamSynchronize(streams[from]));
    CHECK(cudaMemcpy(values[1 - from] + kCount / 2, values[from] + kCount / 4, kCount, cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());
    run.step(step);
  }
  for (int device = 0; device < 2; device++) {
    CHECK(cudaSetDevice(device));
    run.add_device(values[device], kCount);
  }
  return run.finish();
}
