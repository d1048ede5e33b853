// The conversation with the worker: one thread that connects to its socket and does what it is told.
#pragma once

namespace moorage::nccl::control {

// Start the thread when there is a socket to connect to. Safe to call more than once and from several threads.
void start();

// Before the first communicator is made: the worker knows which ids were exchanged for fresh ones before this process came.
// A worker that says nothing is not waited for long.
void await_welcome();

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

}  // namespace moorage::nccl::control
