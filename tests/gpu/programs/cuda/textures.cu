// A texture and a surface on one array: read through one, write through the other.
#include "check.h"

__global__ void blend(cudaTextureObject_t from, cudaSurfaceObject_t to, int width, float add) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  const float value = tex2D<float>(from, (x + 1) % width + 0.5f, y + 0.5f);
  surf2Dwrite(value * 0.5f + add + x * 0.001f, to, x * 4, y);
}

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr int kWidth = 1024;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
  cudaArray_t arrays[2];
  cudaTextureObject_t textures[2];
  cudaSurfaceObject_t surfaces[2];
  std::vector<float> zeros(kWidth * kWidth, 0.25f);
  for (int i = 0; i < 2; i++) {
    CHECK(cudaMallocArray(&arrays[i], &format, kWidth, kWidth, cudaArraySurfaceLoadStore));
    CHECK(cudaMemcpy2DToArray(arrays[i], 0, 0, zeros.data(), kWidth * 4, kWidth * 4, kWidth, cudaMemcpyHostToDevice));
    cudaResourceDesc resource{};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = arrays[i];
    cudaTextureDesc description{};
    description.filterMode = cudaFilterModePoint;
    description.readMode = cudaReadModeElementType;
    CHECK(cudaCreateTextureObject(&textures[i], &resource, &description, nullptr));
    CHECK(cudaCreateSurfaceObject(&surfaces[i], &resource));
  }
  for (int step = 0; step < run.steps(); step++) {
    const int i = step % 2;
    blend<<<dim3(kWidth / 32, kWidth / 8), dim3(32, 8)>>>(textures[i], surfaces[1 - i], kWidth, step * 0.125f);
    run.step(step);
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<float> found(kWidth * kWidth);
  for (auto& array : arrays) {
    CHECK(cudaMemcpy2DFromArray(found.data(), kWidth * 4, array, 0, 0, kWidth * 4, kWidth, cudaMemcpyDeviceToHost));
    run.add(found);
  }
  return run.finish();
}
