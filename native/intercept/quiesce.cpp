#include "quiesce.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "captures.h"
#include "contexts.h"
#include "gate.h"

namespace moorage::quiesce {
namespace {

enum class Phase { Captures, Calls, Work, Seal, Done };

struct Try {
  std::int64_t deadline_ns = 0;
  void (*ended)() = nullptr;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> thread_gone{false};
  std::mutex mutex;  // of the rest, and of moving the gate
  State state = State::Running;
  Phase phase = Phase::Captures;
  std::string where;
  std::string failure;
};

std::mutex& mutex = *new std::mutex;
std::shared_ptr<Try>& current = *new std::shared_ptr<Try>;

std::shared_ptr<Try> now() {
  const std::lock_guard lock(mutex);
  return current;
}

// Move the gate, unless the try was given up meanwhile.
bool enter(Try& attempt, Phase phase, Level level) {
  const std::lock_guard lock(attempt.mutex);
  if (attempt.cancelled) return false;
  attempt.phase = phase;
  if (gate::now() != level) gate::set(level);
  return true;
}

std::string thread_list() {
  std::string text;
  for (const Busy& busy : gate::busy()) {
    text += (text.empty() ? "" : ", ") + std::string("thread ") + std::to_string(busy.tid) + " (" + busy.thread +
            ") is in " + kNames[static_cast<std::size_t>(busy.function)];
  }
  return text;
}

std::string in_the_way(const Try& attempt) {
  switch (attempt.phase) {
    case Phase::Captures: {
      const std::string inside = thread_list();
      const std::size_t captures = captures::running();
      return captures == 0 ? inside : std::to_string(captures) + " stream captures have not ended";
    }
    case Phase::Calls:
    case Phase::Seal: return thread_list();
    case Phase::Work: return "work has not ended in " + attempt.where;
    case Phase::Done: break;
  }
  return "";
}

bool wait_for_captures(Try& attempt) {
  for (;;) {
    if (!gate::wait_until_quiet(attempt.deadline_ns, attempt.cancelled)) return false;
    if (captures::running() == 0) return true;
    if (!gate::wait_for_change(attempt.deadline_ns, [] { return captures::running() == 0; })) return false;
  }
}

bool wait_for_work(Try& attempt) {
  // The report of a try that runs out of time names the context it waits in; which that is, is known only here.
  const CUresult result = contexts::synchronize_all([&](const std::string& name) {
    const std::lock_guard lock(attempt.mutex);
    attempt.where = name;
  });
  if (result == CUDA_SUCCESS) return true;
  const std::lock_guard lock(attempt.mutex);
  attempt.failure = "waiting for " + attempt.where + " answered error " + std::to_string(static_cast<int>(result));
  return false;
}

bool reach(Try& attempt) {
  return enter(attempt, Phase::Captures, Level::NoCapture) && wait_for_captures(attempt) &&
         enter(attempt, Phase::Calls, Level::Closed) &&
         gate::wait_until_quiet(attempt.deadline_ns, attempt.cancelled) &&
         enter(attempt, Phase::Work, Level::Closed) && wait_for_work(attempt) &&
         enter(attempt, Phase::Seal, Level::Sealed) &&
         gate::wait_until_quiet(attempt.deadline_ns, attempt.cancelled) &&
         // What callbacks and NCCL's threads submitted while the rest was held.
         enter(attempt, Phase::Work, Level::Sealed) && wait_for_work(attempt);
}

void* run(void* argument) {
  const std::unique_ptr<std::shared_ptr<Try>> own(static_cast<std::shared_ptr<Try>*>(argument));
  Try& attempt = **own;
  pthread_setname_np(pthread_self(), "moorage-quiesce");
  const bool reached = reach(attempt);
  {
    const std::lock_guard lock(attempt.mutex);
    if (!attempt.cancelled && reached) {
      attempt.phase = Phase::Done;
      attempt.state = State::Sealed;
    } else if (!attempt.cancelled) {
      if (attempt.failure.empty()) attempt.failure = in_the_way(attempt);
      attempt.state = State::Failed;
      attempt.cancelled = true;
      gate::set(Level::Open);
    }
  }
  attempt.thread_gone = true;
  attempt.ended();
  return nullptr;
}

}  // namespace

bool begin(std::int64_t deadline_ns, void (*ended)()) {
  const std::lock_guard lock(mutex);
  if (current != nullptr && !current->thread_gone) return false;
  auto attempt = std::make_shared<Try>();
  attempt->deadline_ns = deadline_ns;
  attempt->ended = ended;
  auto* own = new std::shared_ptr<Try>(attempt);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, run, own);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    delete own;
    return false;
  }
  current = std::move(attempt);
  return true;
}

State state() {
  const auto attempt = now();
  if (attempt == nullptr) return State::Idle;
  const std::lock_guard lock(attempt->mutex);
  return attempt->state;
}

std::string why() {
  const auto attempt = now();
  if (attempt == nullptr) return "";
  const std::lock_guard lock(attempt->mutex);
  return attempt->failure.empty() ? in_the_way(*attempt) : attempt->failure;
}

void cancel() {
  const auto attempt = now();
  if (attempt == nullptr) return;
  const std::lock_guard lock(attempt->mutex);
  if (attempt->state == State::Failed || attempt->state == State::Idle) return;
  if (attempt->failure.empty() && attempt->state == State::Running) attempt->failure = in_the_way(*attempt);
  attempt->cancelled = true;
  attempt->state = State::Idle;
  gate::set(Level::Open);
}

void after_fork_in_child() { new (&current) std::shared_ptr<Try>; }

}  // namespace moorage::quiesce
