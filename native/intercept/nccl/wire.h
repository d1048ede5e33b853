// The frames and tags of the conversation with the worker; nccl_quiesce/wire.py says what they mean.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moorage::nccl::wire {

inline constexpr std::uint32_t kMagic = 0x434E474D;  // "MGNC"
inline constexpr std::uint64_t kVersion = 1;
inline constexpr std::uint32_t kLongest = 64U << 20U;

struct Header {
  std::uint32_t magic;
  std::uint32_t length;
};

enum Tag : std::int64_t {
  // from the process
  kHello = 1,
  kDone = 2,
  kFailed = 3,
  kReport = 4,
  kPrepared = 5,
  kIds = 6,
  kStatusText = 7,
  // to the process
  kWelcome = 16,
  kPrepare = 17,
  kObey = 18,
  kTeardown = 19,
  kMakeIds = 20,
  kRebuild = 21,
  kPart = 22,
  kStatus = 23,
  kKeep = 24,
};

enum Failure : int {
  kDeadline = -1,
  kWrongState = -2,
  kMalformed = -3,
  kRefusedByNccl = -4,
  kCalledOff = -5,
};

}  // namespace moorage::nccl::wire
