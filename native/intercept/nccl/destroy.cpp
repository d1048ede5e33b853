#include "destroy.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>

#include "blocking.h"
#include "create.h"
#include "cuda.h"
#include "graphs.h"
#include "real.h"
#include "register.h"
#include "wire.h"

namespace moorage::nccl {

namespace destroy {

void begin(Gate::Lock&, Comm& comm) {
  comm.ending = true;
  if (comm.dead) return;
  comm.dead = true;
  comm.died_in = gate().phase == Phase::Open ? 0 : gate().attempt;
  if (comm.member != nullptr) gate().gone(*comm.member);
}

int finalize(Comm& comm) {
  if (comm.real == nullptr) return kSuccess;
  int result = real::ncclCommFinalize(comm.real);
  Pause pause;
  while (result == kInProgress && comm.blocking) {
    int state = kSuccess;
    if (const int bad = real::ncclCommGetAsyncError(comm.real, &state); bad != kSuccess) return bad;
    if (state != kInProgress) return state;
    pause();
  }
  return result;
}

int destroy(Comm& comm) { return comm.real == nullptr ? kSuccess : real::ncclCommDestroy(comm.real); }

int abort(Comm& comm) { return comm.real == nullptr ? kSuccess : real::ncclCommAbort(comm.real); }

void ended(Comm& comm, bool for_good) {
  Gate::Lock lock(gate().mutex);
  comm.ending = false;
  if (!for_good) return;
  comm.real = nullptr;
  comm.registrations.clear();
  comm.windows.clear();
  comm.reductions.clear();
  for (Pending* one : std::exchange(comm.pending, {})) {
    for (Comm* other : one->comms) std::erase(other->pending, one);
    gate().leave(lock, one->call);
    delete one;
  }
  // `leave` takes what a creation made for ready.
  if (comm.member != nullptr) gate().gone(*comm.member);
}

}  // namespace destroy

namespace rebuild {
namespace {

// The command given last, and the one that is carried out.
std::atomic<std::uint64_t> newest{0};
std::atomic<std::uint64_t> current{0};

bool called_off() { return newest != current; }

bool listed(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Whether one of these names is that of a child of the communicator, which NCCL makes in the parent's name: it is given up
// with the parent only, and by all members in the same way.
bool gives_birth(const Comm& comm, const std::vector<std::string>& names) {
  const std::string begin = std::string(comm.name()) + "/";
  const std::string grown = create::grown_name(comm.name(), 0);
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    if (name.starts_with(grown.substr(0, grown.size() - 1))) return true;
    return name.starts_with(begin) && name.find('/', begin.size()) == std::string::npos;
  });
}

// Poll until NCCL has done with all of them.
Outcome all_done(const std::vector<Comm*>& waited, const char* what, std::int64_t deadline_ns) {
  Pause pause;
  for (const Comm* comm : waited) {
    for (;;) {
      int state = kSuccess;
      int bad = real::ncclCommGetAsyncError(comm->real, &state);
      if (bad == kSuccess) bad = state;
      if (bad == kSuccess) break;
      const std::string name(comm->name());
      if (bad != kInProgress) {
        const auto* text = static_cast<const char*>(real::ncclGetErrorString(bad));
        return {wire::kRefusedByNccl, std::string(what) + " of communicator " + name + ": " + (text ? text : "?")};
      }
      if (called_off()) return {wire::kCalledOff, std::string(what) + " of communicator " + name + " was called off"};
      if (boottime_ns() >= deadline_ns) {
        return {wire::kDeadline, std::string(what) + " of communicator " + name + " does not end"};
      }
      pause();
    }
  }
  return {};
}

std::vector<void*> take_back(Gate::Lock& lock, const std::vector<std::string>& again) {
  std::vector<Call*> calls;
  for (Call* call = gate().inside_first(); call != nullptr; call = call->next) {
    const bool all = std::all_of(call->creates.begin(), call->creates.end(), [&](const Member* member) {
      return listed(again, member->communicator->name);
    });
    if (!call->creates.empty() && all) calls.push_back(call);
  }
  std::vector<void*> aborted;
  for (Call* call : calls) {
    for (void* real : create::take_back(lock, *call)) aborted.push_back(real);
  }
  return aborted;
}

// Why the communicators cannot be torn down now; empty: they can.
std::string hindrance(const std::vector<std::string>& again) {
  if (const auto refused = refusals(); !refused.empty()) {
    return refused.front().communicator + " " + refused.front().api + ": " + refused.front().why;
  }
  if (graphs::open() > 0) return "a capture with calls of NCCL has not ended";
  for (const Call* call = gate().inside_first(); call != nullptr; call = call->next) {
    if (call->destroys) continue;
    for (const Member* member : call->creates) {
      if (!listed(again, member->communicator->name)) return "a creation of " + member->communicator->name + " runs";
    }
    if (!call->lanes.empty()) return "thread " + std::to_string(call->thread) + " is inside NCCL";
  }
  return "";
}

}  // namespace

std::uint64_t call_off() { return ++newest; }

void begin(std::uint64_t number) { current = number; }

std::int64_t boottime_ns() {
  timespec time{};
  clock_gettime(CLOCK_BOOTTIME, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

Outcome tear_down(std::uint64_t attempt, const std::vector<std::string>& again, const std::vector<std::string>& widowed,
                  std::int64_t deadline_ns, bool abort) {
  Gate& door = gate();
  std::vector<void*> aborted;
  std::vector<Comm*> whole;
  std::vector<void*> rest;
  {
    Gate::Lock lock(door.mutex);
    if (!door.torn) {
      if (door.phase != Phase::Drain || door.attempt != attempt) {
        return {wire::kWrongState, "there was no drain order of this attempt"};
      }
      if (const std::string why = hindrance(again); !why.empty()) return {wire::kWrongState, why};
      door.torn = true;
    }
    while (door.locals > 0 && boottime_ns() < deadline_ns && !called_off()) {
      lock.unlock();
      Pause()();
      lock.lock();
    }
    if (door.locals > 0) return {wire::kDeadline, "a call that issues nothing does not return from NCCL"};
    // One that began before the gate was shut for it: nothing is destroyed yet, and all goes on.
    if (graphs::open() > 0) {
      door.torn = false;
      door.wake();
      return {wire::kWrongState, "a capture with calls of NCCL has not ended"};
    }
    aborted = take_back(lock, again);
    for (Comm* comm : comms()) {
      if (comm->ending) continue;
      if (listed(widowed, comm->name()) && !comm->dead) {
        // Also one that is torn down already: a partner may have exited since the cut.
        if (comm->real != nullptr) aborted.push_back(std::exchange(comm->real, nullptr));
        comm->dead = true;
        door.gone(*comm->member);
      } else if (comm->real == nullptr) {
        continue;
      } else if (abort || comm->leaving || (!comm->dead && gives_birth(*comm, again))) {
        aborted.push_back(std::exchange(comm->real, nullptr));
        comm->leaving = false;
      } else if (comm->dead) {
        rest.push_back(std::exchange(comm->real, nullptr));
      } else {
        whole.push_back(comm);
      }
    }
  }
  graphs::release();
  for (void* real : aborted) real::ncclCommAbort(real);
  for (void* real : rest) real::ncclCommDestroy(real);
  // All are finalized before the first is waited for: several of them may be members of one communicator.
  for (Comm* comm : whole) {
    registered::leave(*comm);
    blocking::off(*comm);
    comm->leaving = true;
    const int bad = real::ncclCommFinalize(comm->real);
    if (bad != kSuccess && bad != kInProgress && bad != kAbsent) {
      return {wire::kRefusedByNccl, "ncclCommFinalize of communicator " + std::string(comm->name()) + " answered " +
                                        std::to_string(bad)};
    }
  }
  if (Outcome bad = all_done(whole, "ncclCommFinalize", deadline_ns); bad.status != 0) return bad;
  for (Comm* comm : whole) {
    const int bad = real::ncclCommDestroy(comm->real);
    const Gate::Lock lock(door.mutex);
    comm->real = nullptr;
    comm->leaving = false;
    if (bad != kSuccess) {
      return {wire::kRefusedByNccl, "ncclCommDestroy of communicator " + std::string(comm->name()) + " answered " +
                                        std::to_string(bad)};
    }
  }
  return {};
}

namespace {

// One communicator, with all members that live here.
Outcome make_anew(const std::string& name, const UniqueId& id, std::int64_t deadline_ns) {
  std::vector<Comm*> members;
  {
    const Gate::Lock lock(gate().mutex);
    for (Comm* comm : comms()) {
      // One that the job destroyed after the last report is expected by the others: it comes, and goes at once.
      const bool expected = !comm->dead || (comm->died_in != 0 && comm->died_in == gate().attempt);
      if (comm->name() == name && expected) members.push_back(comm);
    }
  }
  for (Comm* comm : members) {
    if (comm->real != nullptr) real::ncclCommAbort(std::exchange(comm->real, nullptr));  // of a try that failed
  }
  if (members.size() > 1) real::ncclGroupStart();
  int result = kSuccess;
  for (Comm* comm : members) {
    cuda::set_context(comm->context);
    const int bad = create::init(*comm, {id});
    if (bad != kSuccess && bad != kInProgress) result = bad;
  }
  if (members.size() > 1) {
    const int bad = real::ncclGroupEnd();
    if (bad != kSuccess && bad != kInProgress) result = bad;
  }
  if (result != kSuccess) {
    return {wire::kRefusedByNccl, "communicator " + name + " was not made anew: NCCL answered " + std::to_string(result)};
  }
  if (Outcome bad = all_done(members, "the new creation", deadline_ns); bad.status != 0) return bad;
  for (Comm* comm : members) {
    blocking::on(*comm);
    std::string what;
    if (const int bad = comm->dead ? kSuccess : registered::replay(*comm, what); bad != kSuccess) {
      return {wire::kRefusedByNccl, what + " on communicator " + name + " answered " + std::to_string(bad)};
    }
    if (comm->dead) real::ncclCommAbort(std::exchange(comm->real, nullptr));
  }
  return {};
}

}  // namespace

Outcome rebuild(const Named& communicators, const Named& again, std::int64_t deadline_ns) {
  Gate& door = gate();
  {
    const Gate::Lock lock(door.mutex);
    if (!door.torn) return {wire::kWrongState, "the communicators are not gone"};
    for (const auto& [name, id] : again) create::renew(name, id);
  }
  graphs::release();  // what a try that failed has captured would keep its communicators
  for (const auto& [name, id] : communicators) {
    if (Outcome bad = make_anew(name, id, deadline_ns); bad.status != 0) return bad;
  }
  if (const std::string why = graphs::make_anew(deadline_ns); !why.empty()) return {wire::kRefusedByNccl, why};
  Gate::Lock lock(door.mutex);
  for (const Comm* comm : comms()) {
    if (!comm->dead && comm->real == nullptr && comm->member != nullptr && comm->member->state == State::Ready) {
      return {wire::kWrongState, "communicator " + std::string(comm->name()) + " was not among those to be made anew"};
    }
  }
  door.torn = false;
  door.wake();
  return {};
}

}  // namespace rebuild
}  // namespace moorage::nccl
