// One call of an operation, to be handed to NCCL at once or, in a group, at its outermost end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "comm.h"

namespace moorage::nccl {

enum class What : std::uint8_t {
  AllGather, AllReduce, AlltoAll, Bcast, Broadcast, Gather, Reduce, ReduceScatter, Scatter, Send, Recv,
  WindowRegister, RedOpDestroy, Finalize, Destroy, Abort,
};

struct Op {
  What what;
  Comm* comm;
  const void* send = nullptr;
  void* receive = nullptr;
  std::size_t count = 0;
  int type = 0;
  int reduction = 0;  // of the job
  int peer = 0;       // or root
  void* stream = nullptr;
  bool configured = false;  // the call with a configuration, which may be null
  Config config{};          // a copy, in a group
  void* given = nullptr;    // the job's own, valid during the call
  int flags = 0;
  void* out = nullptr;
};

inline bool has_stream(What what) { return what <= What::Recv; }
// The lane on which it is counted; no member: it issues nothing that is.
Lane lane_of(const Op& op);
// Hand it to NCCL, or all of a group.
int issue(Op& op);
int issue_all(std::vector<Op>& ops);

namespace record {

// How deep in groups this thread is.
unsigned depth();
void add(Op&& op);
void add(Making&& making);

}  // namespace record
}  // namespace moorage::nccl
