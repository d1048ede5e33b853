// What the programs share: a nonce at the start, a line for each step, a digest of everything at the end.
#pragma once

#include <cuda_runtime.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                             \
  do {                                                                                          \
    const cudaError_t status_ = (call);                                                         \
    if (status_ != cudaSuccess) {                                                               \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::fflush(stdout);                                                                      \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (0)

#define REQUIRE(condition)                                                \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::fflush(stdout);                                                \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)

class Run {
 public:
  explicit Run(int argc, char** argv) : steps_(argc > 1 ? std::atoi(argv[1]) : 400) {
    const int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    REQUIRE(read(random, &nonce_, sizeof nonce_) == static_cast<ssize_t>(sizeof nonce_));
    close(random);
    std::printf("{\"nonce\": \"%016llx\"}\n", static_cast<unsigned long long>(nonce_));
    std::fflush(stdout);
  }

  int steps() const { return steps_; }

  // About 100 steps a second, so that a checkpoint meets the program at work.
  void step(int number) const {
    usleep(8000);
    if (number % 5 == 0) {
      std::printf("step %d\n", number);
      std::fflush(stdout);
    }
  }

  template <typename Value>
  void add(const Value& value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < sizeof value; i++) digest_ = (digest_ ^ bytes[i]) * 0x100000001b3ULL;
  }
  template <typename Value>
  void add(const std::vector<Value>& values) {
    for (const Value& value : values) add(value);
  }
  // What lies on the device, after it has come to rest.
  template <typename Value>
  void add_device(const Value* from, std::size_t count) {
    std::vector<Value> values(count);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(values.data(), from, count * sizeof(Value), cudaMemcpyDeviceToHost));
    add(values);
  }

  int finish() const {
    std::printf("{\"nonce\": \"%016llx\", \"digest\": \"%016llx\"}\n", static_cast<unsigned long long>(nonce_),
                static_cast<unsigned long long>(digest_));
    std::fflush(stdout);
    return 0;
  }

 private:
  int steps_;
  std::uint64_t nonce_ = 0;
  std::uint64_t digest_ = 0xcbf29ce484222325ULL;
};

// A step of a generator on every element: cheap, and no two steps give the same.
static __global__ void advance(std::uint32_t* values, std::size_t count, std::uint32_t by) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    values[i] = values[i] * 1664525u + 1013904223u + by;
  }
}
