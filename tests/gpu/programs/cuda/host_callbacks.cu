// Host functions between kernels; each sees the value that the kernel before it left in pinned memory.
#include "check.h"

struct Seen {
  std::uint32_t* value;
  std::uint64_t sum = 0;
  int calls = 0;
};

static void CUDART_CB look(void* argument) {
  Seen& seen = *static_cast<Seen*>(argument);
  seen.sum = seen.sum * 31 + *seen.value;
  seen.calls++;
}

int main(int argc, char** argv) {
  Run run(argc, argv);
  Seen seen{};
  CHECK(cudaMallocHost(&seen.value, 4));
  std::uint32_t* value = nullptr;
  CHECK(cudaMalloc(&value, 4 << 20));
  CHECK(cudaMemset(value, 0, 4 << 20));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (int step = 0; step < run.steps(); step++) {
    for (int i = 0; i < 20; i++) {
      advance<<<64, 256, 0, stream>>>(value, 1 << 20, step + i);
      CHECK(cudaMemcpyAsync(seen.value, value, 4, cudaMemcpyDeviceToHost, stream));
      CHECK(cudaLaunchHostFunc(stream, look, &seen));
    }
    run.step(step);
  }
  CHECK(cudaStreamSynchronize(stream));
  REQUIRE(seen.calls == 20 * run.steps());
  run.add(seen.sum);
  return run.finish();
}
