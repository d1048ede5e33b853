// One try to reach the moment at which nothing runs on any device and nobody can start anything.
#pragma once

#include <cstdint>
#include <string>

namespace moorage::quiesce {

// Start a try that ends at `deadline_ns` (CLOCK_BOOTTIME). It has a thread of its own, because waiting for a device
// cannot be interrupted; `ended` is called from it. False: an earlier try still waits for its device.
bool begin(std::int64_t deadline_ns, void (*ended)());

enum class State { Idle, Running, Sealed, Failed };
State state();

// When failed: what was in the way. When running: what is.
std::string why();

// Give up, open the gate. Also after it was sealed: then this is what lets the job go on.
void cancel();

// Nothing is left of tries in a forked child.
void after_fork_in_child();

}  // namespace moorage::quiesce
