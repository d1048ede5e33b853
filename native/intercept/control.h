// The channel to the worker: one thread that connects to the broker's socket and does what it is told.
#pragma once

#include <cstdint>

#include "wire.h"

namespace moorage::control {

// Start the thread when there is a socket to connect to. Safe to call more than once and from several threads.
void start();

// Does this process have a broker? Without one the proxy only passes calls on.
bool active();

// Is there a connection to it now?
bool connected();

// This process's number in all messages.
std::uint64_t process();

// There is something to tell the broker: a new block, or one that went. It is told within half a second (what went within
// some milliseconds), with what came meanwhile, and before any answer to Status and Quiesce. Costs the first caller of a
// batch one system call.
void new_block();
void block_went();

// Tell it now, before anything that this thread asks next. Not with a lock held that the control thread takes.
void tell_now();

// Wake the control thread.
void poke();

struct Reply {
  bool arrived = false;
  wire::Found found{};
  int descriptor = -1;  // the caller's, when there is one
};
// Ask the broker and wait for its answer. `descriptor` stays the caller's. Must not be called with a lock held that the
// control thread takes. arrived is false when there is no broker or it does not answer.
Reply ask(wire::Type type, std::uint64_t of_process, std::uint64_t id, int descriptor);

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

}  // namespace moorage::control
