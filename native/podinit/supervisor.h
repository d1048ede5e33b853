// The life of a pod from the inside: ranks started, their output passed on, the dead reaped, the last code returned.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "config.h"
#include "frames.h"
#include "hooks.h"

namespace moorage {

class Supervisor {
 public:
  // `output` is where frames go.
  Supervisor(const Config& config, int output);
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Start all ranks and stay until the last has ended and all that they wrote is passed on. Returns the pod's exit
  // code: that of the first rank that failed (128 + signal), or 0.
  int run();

 private:
  struct Stream {
    int fd = -1;
    Kind kind = Kind::Stdout;
    std::size_t owed = 0;  // bytes to pass on before the rank's exit is reported
  };
  struct Rank {
    std::uint32_t rank = 0;
    pid_t pid = -1;
    bool exited = false;
    bool reported = false;
    int code = 0;
    Stream streams[2];
  };

  void start_all();
  void take_signals();
  void reap();
  void exited(Rank& rank, int status);
  void signal_ranks(int number);
  void tell_ranks();
  void enforce_grace();
  bool produce();
  bool pass_on(Rank& rank, Stream& stream);
  bool report(Rank& rank);
  bool all_reported() const;
  void sweep();
  void wait_for_work();

  const Config& config_;
  FrameWriter writer_;
  Hooks hooks_;
  int signals_ = -1;
  std::vector<Rank> ranks_;
  std::size_t turn_ = 0;
  std::optional<int> failure_;
  const Rank* first_failed_ = nullptr;
  std::optional<std::int64_t> kill_at_ms_;
};

}  // namespace moorage
