// 300 streams in a ring: each waits for its neighbour's event of the step before.
#include "check.h"

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr int kStreams = 300;
  constexpr std::size_t kCount = 1 << 14;
  std::vector<cudaStream_t> streams(kStreams);
  std::vector<cudaEvent_t> events(kStreams);
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, kStreams * kCount * 4));
  CHECK(cudaMemset(values, 1, kStreams * kCount * 4));
  for (int i = 0; i < kStreams; i++) {
    CHECK(cudaStreamCreateWithFlags(&streams[i], i % 2 ? cudaStreamNonBlocking : cudaStreamDefault));
    CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    CHECK(cudaEventRecord(events[i], streams[i]));
  }
  for (int step = 0; step < run.steps(); step++) {
    for (int i = 0; i < kStreams; i++) {
      CHECK(cudaStreamWaitEvent(streams[i], events[(i + 1) % kStreams], 0));
      advance<<<4, 256, 0, streams[i]>>>(values + i * kCount, kCount, step);
      CHECK(cudaEventRecord(events[i], streams[i]));
    }
    run.step(step);
  }
  CHECK(cudaDeviceSynchronize());
  run.add_device(values, kStreams * kCount);
  return run.finish();
}
