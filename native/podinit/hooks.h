// Signals that tell the ranks of a checkpoint or a restore: one for each new line of the pod's file of events.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moorage {

// The worker appends a line and then sends SIGURG to pid 1, as often as it likes: how many lines were taken is kept here,
// in memory that a checkpoint saves together with the file, so each line is acted on once, whoever dies in between.
class Hooks {
 public:
  Hooks(std::string path, std::map<std::string, int> signals);

  // The signals to send now, in the order of the lines that are new.
  std::vector<int> take();

 private:
  std::string path_;
  std::map<std::string, int> signals_;  // by the kind of event
  std::uint64_t taken_ = 0;             // number of the last line that was acted on
};

// Whether a process would handle the signal; one that would not is left alone, since the default may be to end it.
bool catches(pid_t pid, int number);

}  // namespace moorage
