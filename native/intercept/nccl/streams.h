// The streams that NCCL works in, as far as a drain must know them.
#pragma once

#include <string>
#include <vector>

#include "comm.h"

namespace moorage::nccl::streams {

// A communicator is used with this stream. Under the gate's lock. Those of the newest calls come last.
void note(Comm& comm, void* stream);

// Names of the streams that still have work of NCCL in them. Without the lock.
std::vector<std::string> busy();

// The default stream of each thread has one handle for all threads: nobody else can ask for it, and NCCL launches some
// operations from a thread of its own, where the handle means another stream. So they go into a stream of ours, in the
// order in which the thread's own stream has them.
class Detour {
 public:
  // The stream to give to NCCL for `stream`.
  void* through(const Comm& comm, void* stream);
  bool taken() const { return !contexts_.empty(); }
  // Right before and after the operations are handed to NCCL.
  void leave() const;
  void join() const;

 private:
  std::vector<void*> contexts_;
};

}  // namespace moorage::nccl::streams
