// What the proxy needs to know of nccl.h: numbers, and the structures that are passed by value or looked into.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moorage::nccl {

struct UniqueId {
  char internal[128];
};
struct Team {
  int ranks, rank, stride;
};
struct Multimem {
  void* base;
};

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
inline constexpr int kAbsent = kInvalidUsage;  // the real library has no such function, or there is none
inline constexpr int kBuiltInReductions = 5;
inline constexpr int kNoColor = -1;
inline constexpr int kUndefined = -2147483647 - 1;

// The head of every ncclConfig_t.
struct ConfigHead {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};
inline constexpr unsigned kMagic = 0xcafebeef;
inline constexpr unsigned kFirstConfigVersion = 21400;

// This thread is inside the real library: what it calls there passes.
struct Inside {
  static thread_local constinit unsigned depth __attribute__((tls_model("initial-exec")));
  Inside() { ++depth; }
  ~Inside() { --depth; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

}  // namespace moorage::nccl
