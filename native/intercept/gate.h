// The call gate: lets the process reach a moment at which no thread is inside the driver submitting work.
//
// A call costs one store to a word that only its own thread writes, and one load of a word that nobody writes while the
// gate is open. Whoever closes the gate pays for the order between the two with membarrier(2).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "functions.h"

namespace moorage {

enum class Level : std::uint32_t {
  Open = 0,
  NoCapture = 1,  // no new stream capture begins, all else goes on: captures that run come to their end
  Closed = 2,     // the job's threads are held; the driver's callbacks and NCCL's threads pass, so that streams drain
  Sealed = 3,     // everybody is held
  Forked = 4,     // a child of a process that used CUDA: every call fails, as the driver's own do
};

struct alignas(64) ThreadState {
  std::atomic<std::uint32_t> word{0};  // depth in the low half, the outermost function in the high half; 0 is outside
  std::atomic<std::uint32_t> tid{0};
  std::atomic<bool> used{false};
  std::atomic<bool> held{false};
  const void* caller = nullptr;  // of the hooked function that this thread is in; only its own thread looks
  ThreadState* next = nullptr;
};

struct Busy {
  std::uint32_t tid;
  Fn function;
  std::string thread;  // its name, as the kernel knows it
};

namespace gate {

// Values of the static linker's own model: one pointer a thread, no call to reach it.
extern thread_local constinit ThreadState* current __attribute__((tls_model("initial-exec")));
extern std::atomic<std::uint32_t> level;
extern bool asymmetric;  // membarrier works; else each call pays for its own fence

// Call once, before any other thread can call in.
void start();

ThreadState* adopt_thread();
bool admit(ThreadState* state, Fn function);
void left();

Level now();
// Go to `next`. Lowering it lets held threads go on.
void set(Level next);

// Wait until no thread is inside the driver at this level, those aside that only wait there. False at the deadline
// (CLOCK_BOOTTIME, ns), or when `cancelled` has become true.
bool wait_until_quiet(std::int64_t deadline_ns, const std::atomic<bool>& cancelled);
// Wait until `condition`, which is looked at after every changed(). False at the deadline.
bool wait_for_change(std::int64_t deadline_ns, bool (*condition)());
// Wake them to look again.
void changed();

// The threads inside that do more than wait. For reports.
std::vector<Busy> busy();
std::uint32_t held();
std::uint32_t waiting();  // threads inside functions that only wait

// The code that called the hooked function in which this thread is.
inline const void* caller() { return current == nullptr ? nullptr : current->caller; }

void after_fork_in_child(bool refuse);

std::int64_t boottime_ns();

}  // namespace gate

// Around every call. Inline, but where a sanitizer watches: then it is one function that is watched, rather than 700.
#if defined(MOORAGE_GATE_APART)
#define MOORAGE_GATE_CALL
#else
#define MOORAGE_GATE_CALL __attribute__((always_inline)) inline
#endif

class Call {
 public:
  explicit Call(Fn function);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool admitted() const { return state_ != nullptr; }
  CUresult refusal() const { return CUDA_ERROR_NOT_INITIALIZED; }

  // Who called, for hooks that ask with gate::caller().
  void from(const void* caller) const {
    if (state_ != nullptr) state_->caller = caller;
  }

 private:
  ThreadState* state_;
};

#if !defined(MOORAGE_GATE_APART) || defined(MOORAGE_GATE_HERE)

MOORAGE_GATE_CALL Call::Call(Fn function) {
  ThreadState* state = gate::current;
  if (state == nullptr) [[unlikely]] state = gate::adopt_thread();
  state_ = state;
  const std::uint32_t word = state->word.load(std::memory_order_relaxed);
  if (word != 0) {
    state->word.store(word + 1, std::memory_order_relaxed);
    return;
  }
  const std::uint32_t inside = static_cast<std::uint32_t>(function) << 16U | 1U;
  if (gate::asymmetric) [[likely]] {
    state->word.store(inside, std::memory_order_relaxed);
    __asm__ volatile("" ::: "memory");
    if (gate::level.load(std::memory_order_relaxed) == 0) [[likely]] return;
  } else {
    state->word.exchange(inside, std::memory_order_seq_cst);
    if (gate::level.load(std::memory_order_seq_cst) == 0) return;
  }
  if (!gate::admit(state, function)) state_ = nullptr;
}

MOORAGE_GATE_CALL Call::~Call() {
  if (state_ == nullptr) return;
  const std::uint32_t word = state_->word.load(std::memory_order_relaxed);
  if ((word & 0xFFFFU) > 1) {
    state_->word.store(word - 1, std::memory_order_relaxed);
    return;
  }
  if (gate::asymmetric) [[likely]] {
    state_->word.store(0, std::memory_order_release);
    __asm__ volatile("" ::: "memory");
    if (gate::level.load(std::memory_order_relaxed) == 0) [[likely]] return;
  } else {
    state_->word.exchange(0, std::memory_order_seq_cst);
    if (gate::level.load(std::memory_order_seq_cst) == 0) return;
  }
  gate::left();
}

#endif

}  // namespace moorage
