// Calls of NCCL that were captured into CUDA graphs: what is needed to capture them again, and to count their launches.
// The graphs themselves are the libcuda proxy's business (../graphs/share.h); without it such calls are refused.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm.h"
#include "record.h"

namespace moorage::nccl::graphs {

// Around the hand-over to NCCL of calls that are captured: one, or all of a group.
class Capturing {
 public:
  // Takes what it needs of the calls; some of a group may not be captured, and then all are refused.
  explicit Capturing(std::span<const Op> ops);
  // NCCL has answered, and is done with all of them.
  void ended(int result);
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;
  ~Capturing() { ended(kInternalError); }

 private:
  std::vector<Op> ops_;
  void* look_ = nullptr;
};

// Captures that have calls of NCCL and have not ended: communicators cannot go now.
std::size_t open();
// What cannot be carried over. Under the gate's lock.
void add_refusals(std::vector<Refused>& found);

// Before the communicators are destroyed: NCCL waits for its graphs otherwise.
void release();
// After all were made anew. The answer is empty, or what was wrong.
std::string make_anew(std::int64_t deadline_ns);

}  // namespace moorage::nccl::graphs
