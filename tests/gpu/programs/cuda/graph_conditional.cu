// A graph with a WHILE node whose body decides on the device how often it runs.
#include "check.h"

__global__ void turn(std::uint32_t* values, cudaGraphConditionalHandle handle) {
  values[1] = values[1] * 1664525u + 1013904223u;
  values[0]--;
  cudaGraphSetConditional(handle, values[0] != 0 ? 1 : 0);
}

__global__ void start(std::uint32_t* values) { values[0] = 1 + values[1] % 50; }

int main(int argc, char** argv) {
  Run run(argc, argv);
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, 4 << 20));
  CHECK(cudaMemset(values, 9, 4 << 20));
  cudaGraph_t graph;
  CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphConditionalHandle handle;
  CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault));
  cudaKernelNodeParams first{};
  void* first_arguments[] = {&values};
  first.func = reinterpret_cast<void*>(start);
  first.gridDim = first.blockDim = dim3(1);
  first.kernelParams = first_arguments;
  cudaGraphNode_t begin;
  CHECK(cudaGraphAddKernelNode(&begin, graph, nullptr, 0, &first));
  cudaGraphNodeParams loop{};
  loop.type = cudaGraphNodeTypeConditional;
  loop.conditional.handle = handle;
  loop.conditional.type = cudaGraphCondTypeWhile;
  loop.conditional.size = 1;
  cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
  CHECK(cudaGraphAddNode(&node, graph, &begin, nullptr, 1, &loop));
#else
  CHECK(cudaGraphAddNode(&node, graph, &begin, 1, &loop));
#endif
  cudaGraph_t body = loop.conditional.phGraph_out[0];
  cudaKernelNodeParams inner{};
  void* inner_arguments[] = {&values, &handle};
  inner.func = reinterpret_cast<void*>(turn);
  inner.gridDim = inner.blockDim = dim3(1);
  inner.kernelParams = inner_arguments;
  cudaGraphNode_t turning;
  CHECK(cudaGraphAddKernelNode(&turning, body, nullptr, 0, &inner));
  cudaGraphExec_t executable;
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (int step = 0; step < run.steps(); step++) {
    CHECK(cudaGraphLaunch(executable, stream));
    run.step(step);
  }
  run.add_device(values, 2);
  return run.finish();
}
