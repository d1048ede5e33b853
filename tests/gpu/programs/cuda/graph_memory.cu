// A graph that allocates and frees its own memory.
#include "check.h"

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr std::size_t kCount = 1 << 20;
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, kCount * 4));
  CHECK(cudaMemset(values, 5, kCount * 4));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  std::uint32_t* scratch = nullptr;
  CHECK(cudaMallocAsync(&scratch, kCount * 4, stream));
  CHECK(cudaMemcpyAsync(scratch, values, kCount * 4, cudaMemcpyDeviceToDevice, stream));
  advance<<<64, 256, 0, stream>>>(scratch, kCount, 17);
  CHECK(cudaMemcpyAsync(values, scratch, kCount * 4, cudaMemcpyDeviceToDevice, stream));
  CHECK(cudaFreeAsync(scratch, stream));
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable;
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int step = 0; step < run.steps(); step++) {
    CHECK(cudaGraphLaunch(executable, stream));
    run.step(step);
  }
  run.add_device(values, kCount);
  return run.finish();
}
