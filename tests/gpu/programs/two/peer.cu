// One process with both GPUs and peer access both ways: each GPU's kernels write into the other's memory, into some of it
// that was there before the access was granted and some that came after.
#include "../cuda/check.h"

constexpr std::size_t kCount = 4 << 20;

int main(int argc, char** argv) {
  Run run(argc, argv);
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  REQUIRE(devices >= 2);
  std::uint32_t* before[2] = {};
  std::uint32_t* after[2] = {};
  for (int device = 0; device < 2; device++) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaMalloc(&before[device], kCount * 4));
    CHECK(cudaMemset(before[device], device + 1, kCount * 4));
  }
  for (int device = 0; device < 2; device++) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaDeviceEnablePeerAccess(1 - device, 0));
  }
  for (int device = 0; device < 2; device++) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaMalloc(&after[device], kCount * 4));
    CHECK(cudaMemset(after[device], device + 3, kCount * 4));
    CHECK(cudaDeviceSynchronize());
  }
  for (int step = 0; step < run.steps(); step++) {
    for (int device = 0; device < 2; device++) {
      CHECK(cudaSetDevice(device));
      advance<<<64, 256>>>(before[1 - device], kCount, step + device);
      advance<<<64, 256>>>(after[1 - device], kCount, 2 * step + device);
      CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaMemcpyPeer(after[0], 0, before[1], 1, kCount * 2));
    CHECK(cudaMemcpy(after[1] + kCount / 2, before[0], kCount * 2, cudaMemcpyDefault));
    run.step(step);
  }
  for (int device = 0; device < 2; device++) {
    CHECK(cudaSetDevice(device));
    run.add_device(before[device], kCount);
    run.add_device(after[device], kCount);
  }
  return run.finish();
}
