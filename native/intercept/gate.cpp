#define MOORAGE_GATE_HERE
#include "gate.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

#include "callers.h"

namespace moorage::gate {

thread_local constinit ThreadState* current __attribute__((tls_model("initial-exec"))) = nullptr;
std::atomic<std::uint32_t> level{0};
bool asymmetric = false;

namespace {

std::atomic<ThreadState*> threads{nullptr};
std::atomic<std::uint32_t> changes{0};
pthread_key_t key;

static_assert(kFunctions < 0x10000);

long membarrier(int command) { return syscall(SYS_membarrier, command, 0U, 0); }

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) {
  timespec left{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen,
          timeout_ns < 0 ? nullptr : &left, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, nullptr, nullptr,
          0);
}

// After this, whoever was running sees what was written before it, and what they had written is seen here.
void order_against_everybody() {
  if (!asymmetric) return;
  // Registered each time: a process that CRIU has restored may have lost its registration, and asking twice is free.
  membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
  if (membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0) membarrier(MEMBARRIER_CMD_GLOBAL);
}

void thread_ended(void* argument) {
  auto* state = static_cast<ThreadState*>(argument);
  current = nullptr;
  state->word.store(0, std::memory_order_release);
  state->used.store(false, std::memory_order_release);
  if (level.load(std::memory_order_seq_cst) != 0) changed();
}

bool begins_capture(Fn function) {
  const char* name = kNames[static_cast<std::size_t>(function)];
  return std::strncmp(name, "cuStreamBegin", 13) == 0 && std::strstr(name, "apture") != nullptr;
}

bool may_pass(Level at, Fn function) {
  switch (at) {
    case Level::Open: return true;
    case Level::NoCapture: return !begins_capture(function);
    case Level::Closed: return callers::inside_driver_or_nccl();
    case Level::Sealed:
    case Level::Forked: return false;
  }
  return false;
}

Fn function_of(std::uint32_t word) { return static_cast<Fn>(word >> 16U); }

bool only_waits(std::uint32_t word) { return kKinds[word >> 16U] == Kind::Wait; }

// Has this state a thread inside that does more than wait? At NoCapture only those that begin a capture matter.
bool is_busy(const ThreadState& state, Level at) {
  const std::uint32_t word = state.word.load(std::memory_order_acquire);
  if (word == 0 || &state == current) return false;
  if (at == Level::NoCapture) return begins_capture(function_of(word));
  return !only_waits(word);
}

std::string thread_name(std::uint32_t tid) {
  const std::string path = "/proc/self/task/" + std::to_string(tid) + "/comm";
  char name[32] = "";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return name;
  const ssize_t length = read(fd, name, sizeof name - 1);
  close(fd);
  if (length > 0) name[length - 1] = '\0';
  return name;
}

}  // namespace

void start() {
  pthread_key_create(&key, thread_ended);
  asymmetric = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
}

ThreadState* adopt_thread() {
  ThreadState* state = threads.load(std::memory_order_acquire);
  for (; state != nullptr; state = state->next) {
    bool free = false;
    if (state->used.compare_exchange_strong(free, true, std::memory_order_acq_rel)) break;
  }
  if (state == nullptr) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignof(ThreadState), sizeof(ThreadState)) != 0) std::abort();
    state = new (memory) ThreadState;
    state->used.store(true, std::memory_order_relaxed);
    state->next = threads.load(std::memory_order_relaxed);
    while (!threads.compare_exchange_weak(state->next, state, std::memory_order_release)) {
    }
  }
  state->tid.store(static_cast<std::uint32_t>(syscall(SYS_gettid)), std::memory_order_relaxed);
  pthread_setspecific(key, state);
  current = state;
  return state;
}

// Called by a thread that found the gate not open. Returns with the thread inside, or false when it may never enter.
bool admit(ThreadState* state, Fn function) {
  const std::uint32_t inside = static_cast<std::uint32_t>(function) << 16U | 1U;
  for (;;) {
    const auto seen = static_cast<Level>(level.load(std::memory_order_seq_cst));
    // Outside while it looks who calls, which may take long: the closer need not wait for that.
    state->word.store(0, std::memory_order_seq_cst);
    changed();
    if (seen == Level::Forked) return false;
    if (may_pass(seen, function)) {
      state->word.exchange(inside, std::memory_order_seq_cst);
      if (static_cast<Level>(level.load(std::memory_order_seq_cst)) == seen) return true;
      continue;
    }
    state->held.store(true, std::memory_order_relaxed);
    futex_wait(level, static_cast<std::uint32_t>(seen), -1);
    state->held.store(false, std::memory_order_relaxed);
  }
}

void left() { changed(); }

void changed() {
  changes.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(changes);
}

Level now() { return static_cast<Level>(level.load(std::memory_order_seq_cst)); }

void set(Level next) {
  level.store(static_cast<std::uint32_t>(next), std::memory_order_seq_cst);
  order_against_everybody();
  futex_wake_all(level);
  changed();
}

bool wait_until_quiet(std::int64_t deadline_ns, const std::atomic<bool>& cancelled) {
  const Level at = now();
  for (;;) {
    const std::uint32_t seen = changes.load(std::memory_order_seq_cst);
    bool quiet = true;
    for (const ThreadState* state = threads.load(std::memory_order_acquire); state != nullptr; state = state->next) {
      if (is_busy(*state, at)) quiet = false;
    }
    if (cancelled.load()) return false;
    if (quiet) return true;
    const std::int64_t left_ns = deadline_ns - boottime_ns();
    if (left_ns <= 0) return false;
    futex_wait(changes, seen, left_ns);
  }
}

bool wait_for_change(std::int64_t deadline_ns, bool (*condition)()) {
  for (;;) {
    const std::uint32_t seen = changes.load(std::memory_order_seq_cst);
    if (condition()) return true;
    const std::int64_t left_ns = deadline_ns - boottime_ns();
    if (left_ns <= 0) return false;
    futex_wait(changes, seen, left_ns);
  }
}

std::vector<Busy> busy() {
  std::vector<Busy> found;
  const Level at = now();
  for (const ThreadState* state = threads.load(std::memory_order_acquire); state != nullptr; state = state->next) {
    const std::uint32_t word = state->word.load(std::memory_order_acquire);
    if (word == 0 || !is_busy(*state, at)) continue;
    const std::uint32_t tid = state->tid.load(std::memory_order_relaxed);
    found.push_back({tid, function_of(word), thread_name(tid)});
  }
  return found;
}

std::uint32_t held() {
  std::uint32_t count = 0;
  for (const ThreadState* state = threads.load(std::memory_order_acquire); state != nullptr; state = state->next) {
    if (state->held.load(std::memory_order_relaxed)) ++count;
  }
  return count;
}

std::uint32_t waiting() {
  std::uint32_t count = 0;
  for (const ThreadState* state = threads.load(std::memory_order_acquire); state != nullptr; state = state->next) {
    const std::uint32_t word = state->word.load(std::memory_order_acquire);
    if (word != 0 && state != current && only_waits(word)) ++count;
  }
  return count;
}

void after_fork_in_child(bool refuse) {
  for (ThreadState* state = threads.load(std::memory_order_acquire); state != nullptr; state = state->next) {
    state->held.store(false, std::memory_order_relaxed);
    if (state == current) {
      state->tid.store(static_cast<std::uint32_t>(syscall(SYS_gettid)), std::memory_order_relaxed);
      continue;
    }
    state->word.store(0, std::memory_order_relaxed);
    state->used.store(false, std::memory_order_relaxed);
  }
  level.store(static_cast<std::uint32_t>(refuse ? Level::Forked : Level::Open), std::memory_order_seq_cst);
}

std::int64_t boottime_ns() {
  timespec time{};
  clock_gettime(CLOCK_BOOTTIME, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace moorage::gate
