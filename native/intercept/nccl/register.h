// What hangs on a communicator and has to be there again on its successor: buffers, windows, reductions.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm.h"

namespace moorage::nccl::registered {

// Register with NCCL; `out` is where the job wants its handle. In a group it is only known when the group has ended.
int window(Comm& comm, void* buffer, std::size_t size, int flags, void* out);
// Learn what NCCL filled in.
void settle_windows(const std::vector<Comm*>& comms);
int drop_reduction(Comm& comm, int handle);

// Before the real communicator is destroyed, and on the one made anew. An answer that is not kSuccess ends it.
void leave(Comm& comm);
int replay(Comm& comm, std::string& why);

}  // namespace moorage::nccl::registered
