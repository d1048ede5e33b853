// Prints what a call costs through the proxy and straight to the fake driver, in nanoseconds. No test.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

namespace {

// cuCtxPopCurrent with nothing to pop: the fake driver has next to nothing to do.
using Call = CUresult (*)(CUcontext*);

double once(Call call) {
  constexpr int kCalls = 2'000'000;
  CUcontext context = nullptr;
  const auto begun = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call(&context);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begun).count() / kCalls;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main() {
  OK(cuInit(0));
  void* real = dlopen(REAL, RTLD_NOW);
  void* proxy = dlopen(PROXY, RTLD_NOW);
  const auto direct = reinterpret_cast<Call>(dlsym(real, "cuCtxPopCurrent_v2"));
  const auto through = reinterpret_cast<Call>(dlsym(proxy, "cuCtxPopCurrent_v2"));
  std::vector<double> without;
  std::vector<double> with;
  for (int round = 0; round < 11; ++round) {
    without.push_back(once(direct));
    with.push_back(once(through));
  }
  std::printf("{\"direct_ns\": %.2f, \"proxy_ns\": %.2f}\n", median(without), median(with));
}
