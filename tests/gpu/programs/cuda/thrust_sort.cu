// Thrust: sort, scan and reduce of fresh numbers in every step.
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sort.h>

#include "check.h"

int main(int argc, char** argv) {
  Run run(argc, argv);
  constexpr std::size_t kCount = 1 << 20;
  thrust::device_vector<std::uint32_t> values(kCount, 11), work(kCount);
  for (int step = 0; step < run.steps(); step++) {
    advance<<<64, 256>>>(thrust::raw_pointer_cast(values.data()), kCount, step);
    thrust::copy(values.begin(), values.end(), work.begin());
    thrust::sort(work.begin(), work.end());
    thrust::inclusive_scan(work.begin(), work.end(), work.begin());
    run.add(static_cast<std::uint32_t>(thrust::reduce(work.begin(), work.end(), 0u)));
    run.step(step);
  }
  return run.finish();
}
