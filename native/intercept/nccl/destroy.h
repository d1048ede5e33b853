// The end of communicators: by the job, and all at once at a cut; and how they are made anew.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm.h"

namespace moorage::nccl {

namespace destroy {

// The job gives a communicator up. Under the lock, before NCCL hears of it.
void begin(Gate::Lock& lock, Comm& comm);
int finalize(Comm& comm);
int destroy(Comm& comm);
int abort(Comm& comm);
// NCCL has answered; `for_good`: there is nothing left of it.
void ended(Comm& comm, bool for_good);

}  // namespace destroy

namespace rebuild {

struct Outcome {
  int status = 0;  // as a Failed of wire.py has it
  std::string text;
};

// Both as nccl_quiesce/wire.py says. Deadlines in ns of CLOCK_BOOTTIME. They take long; a thread of their own.
Outcome tear_down(std::uint64_t attempt, const std::vector<std::string>& again, const std::vector<std::string>& widowed,
                  std::int64_t deadline_ns, bool abort = false);
using Named = std::vector<std::pair<std::string, UniqueId>>;
Outcome rebuild(const Named& communicators, const Named& again, std::int64_t deadline_ns);

// What is carried out ends soon, with kCalledOff. Answers the number by which the next one begins.
std::uint64_t call_off();
void begin(std::uint64_t number);

std::int64_t boottime_ns();

}  // namespace rebuild
}  // namespace moorage::nccl
