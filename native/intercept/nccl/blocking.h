// Communicators are made non-blocking underneath, so that a creation can be taken back. Once they are there they block,
// if the job's do: NCCL starts a thread for every call on a communicator that does not.
#pragma once

#include "comm.h"

namespace moorage::nccl::blocking {

// For all that issues operations; does nothing to a communicator that the job wants non-blocking. NCCL has no call for it:
// the flag is found in NCCL's own structure by the name beside it, which is a pointer of ours. Where it is not found for
// certain the communicator stays as it was made, and is slower.
void on(Comm& comm);
// Before a child is made of it, and before it is finalized together with others.
void off(Comm& comm);

}  // namespace moorage::nccl::blocking
