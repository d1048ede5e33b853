// Starting one rank.
#pragma once

#include <sys/types.h>

#include "config.h"

namespace moorage {

struct Launched {
  pid_t pid = -1;
  int out = -1;  // read ends, non-blocking
  int err = -1;
};

// Start the rank in a session of its own, as the configured user, with a pipe each for stdout and stderr. What keeps
// it from starting is written to its stderr; its exit code is then 127 (no such command) or 126 (any other reason).
// pid is -1, with errno set, only when there is no process or pipe to be had.
Launched launch(const Config& config, const RankConfig& rank);

// Become a command in a folder. What keeps it from starting is written to stderr; the exit code is then as a rank's. The
// runtime would enter the folder as root, before it becomes the user: past what is closed to that user.
[[noreturn]] void enter(const char* folder, char** argv);

}  // namespace moorage
