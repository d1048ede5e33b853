// Stream-ordered allocation from the default pool and from one of the program's own.
#include "check.h"

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr std::size_t kCount = 1 << 20;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t pool;
  CHECK(cudaMemPoolCreate(&pool, &properties));
  std::uint64_t keep = 32 << 20;
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  std::uint32_t* kept = nullptr;
  CHECK(cudaMallocFromPoolAsync(&kept, kCount * 4, pool, stream));
  CHECK(cudaMemsetAsync(kept, 3, kCount * 4, stream));
  for (int step = 0; step < run.steps(); step++) {
    std::uint32_t *one = nullptr, *other = nullptr;
    CHECK(cudaMallocAsync(&one, kCount * 4, stream));
    CHECK(cudaMallocFromPoolAsync(&other, kCount * 4 / 2, pool, stream));
    CHECK(cudaMemcpyAsync(one, kept, kCount * 4, cudaMemcpyDeviceToDevice, stream));
    advance<<<64, 256, 0, stream>>>(one, kCount, step);
    CHECK(cudaMemcpyAsync(other, one, kCount * 2, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaMemcpyAsync(kept, one, kCount * 4, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaMemcpyAsync(kept + kCount / 2, other, kCount * 2, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaFreeAsync(one, stream));
    CHECK(cudaFreeAsync(other, stream));
    run.step(step);
  }
  run.add_device(kept, kCount);
  return run.finish();
}
