#include "supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>

#include "launch.h"

namespace moorage {
namespace {

constexpr int kReaderPollMs = 50;
constexpr int kPoke = SIGURG;  // look at the file of events; ignored by whoever does not know it
constexpr int kForwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

std::int64_t monotonic_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

int open_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, kPoke);
  for (const int number : kForwarded) sigaddset(&set, number);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

}  // namespace

Supervisor::Supervisor(const Config& config, int output)
    : config_(config), writer_(output), hooks_(config.events, config.hooks) {}

int Supervisor::run() {
  signals_ = open_signals();
  start_all();
  while (!all_reported()) {
    enforce_grace();
    while (writer_.flush() && produce()) {
    }
    if (!all_reported()) wait_for_work();
  }
  sweep();
  const int code = failure_.value_or(0);
  while (!writer_.flush()) wait_for_work();
  writer_.submit_number(Kind::Ended, 0, code);
  while (!writer_.flush()) wait_for_work();
  writer_.wait_until_taken();
  return code;
}

void Supervisor::start_all() {
  ranks_.resize(config_.ranks.size());
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    rank.rank = config_.ranks[i].rank;
    rank.streams[1].kind = Kind::Stderr;
    const Launched launched = failure_ ? Launched{} : launch(config_, config_.ranks[i]);
    rank.pid = launched.pid;
    rank.streams[0].fd = launched.out;
    rank.streams[1].fd = launched.err;
    while (!writer_.flush()) wait_for_work();
    if (rank.pid > 0) {
      writer_.submit_number(Kind::Started, rank.rank, rank.pid);
      continue;
    }
    if (!failure_) {
      const std::string why = std::strerror(errno);
      writer_.submit_text(Kind::Stderr, rank.rank, "moorage: no process for this rank: " + why + "\n");
      failure_ = 126;
      signal_ranks(SIGTERM);
      kill_at_ms_ = monotonic_ms() + config_.grace_ms;
    }
    // Not started because another one has failed already: as if it had been told to end with the others.
    rank.exited = true;
    rank.code = 128 + SIGTERM;
  }
}

void Supervisor::take_signals() {
  signalfd_siginfo info{};
  while (read(signals_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    if (info.ssi_signo == kPoke) {
      tell_ranks();
    } else if (info.ssi_signo != SIGCHLD) {
      signal_ranks(static_cast<int>(info.ssi_signo));
    }
  }
  // Not only after SIGCHLD: one that came before the signalfd existed would be missed, and the call is cheap.
  reap();
}

void Supervisor::reap() {
  for (;;) {
    int status = 0;
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid < 0 && errno == EINTR) continue;
    if (pid <= 0) return;
    const auto found = std::find_if(ranks_.begin(), ranks_.end(),
                                    [pid](const Rank& rank) { return rank.pid == pid && !rank.exited; });
    if (found != ranks_.end()) exited(*found, status);
  }
}

void Supervisor::exited(Rank& rank, int status) {
  rank.exited = true;
  rank.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  for (Stream& stream : rank.streams) {
    // A process that the rank left behind may write for ever: the exit is reported behind what is in the pipe now.
    int waiting = 0;
    if (stream.fd >= 0 && ioctl(stream.fd, FIONREAD, &waiting) == 0) stream.owed = static_cast<std::size_t>(waiting);
  }
  if (rank.code != 0 && !failure_) {
    failure_ = rank.code;
    first_failed_ = &rank;
    signal_ranks(SIGTERM);
    kill_at_ms_ = monotonic_ms() + config_.grace_ms;
  }
}

void Supervisor::signal_ranks(int number) {
  for (const Rank& rank : ranks_) {
    if (rank.pid <= 0 || rank.exited) continue;
    // The group exists only once the child has called setsid.
    if (kill(-rank.pid, number) != 0) kill(rank.pid, number);
  }
}

// Only the ranks themselves, not what they started, and only those that have a handler.
void Supervisor::tell_ranks() {
  for (const int number : hooks_.take()) {
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0 && !rank.exited && catches(rank.pid, number)) kill(rank.pid, number);
    }
  }
}

void Supervisor::enforce_grace() {
  if (!kill_at_ms_ || monotonic_ms() < *kill_at_ms_) return;
  signal_ranks(SIGKILL);
  kill_at_ms_.reset();
}

// Pass on one frame from the next source in turn. Returns whether there was one.
bool Supervisor::produce() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[(turn_ + i) % ranks_.size()];
    if (pass_on(rank, rank.streams[0]) || pass_on(rank, rank.streams[1]) || report(rank)) {
      turn_ = (turn_ + i + 1) % ranks_.size();
      return true;
    }
  }
  return false;
}

bool Supervisor::pass_on(Rank& rank, Stream& stream) {
  if (stream.fd < 0) return false;
  const auto room = writer_.payload();
  const ssize_t got = read(stream.fd, room.data(), room.size());
  if (got > 0) {
    const auto length = static_cast<std::size_t>(got);
    stream.owed -= std::min(stream.owed, length);
    writer_.submit(stream.kind, rank.rank, length);
    return true;
  }
  if (got < 0 && errno == EINTR) return false;
  stream.owed = 0;
  if (got == 0) {
    close(stream.fd);
    stream.fd = -1;
  }
  return false;
}

bool Supervisor::report(Rank& rank) {
  if (!rank.exited || rank.reported || rank.streams[0].owed > 0 || rank.streams[1].owed > 0) return false;
  // The others ended because of the first that failed: whoever is told of them first would blame them.
  if (first_failed_ && first_failed_ != &rank && !first_failed_->reported) return false;
  rank.reported = true;
  writer_.submit_number(Kind::Exited, rank.rank, rank.code);
  return true;
}

bool Supervisor::all_reported() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.reported; });
}

// Kill what the ranks left behind, and pass on what it had written.
void Supervisor::sweep() {
  if (getpid() == 1) kill(-1, SIGKILL);  // anywhere else this would reach processes that are not the pod's
  for (;;) {
    const pid_t pid = waitpid(-1, nullptr, 0);
    if (pid < 0 && errno != EINTR) break;
  }
  for (;;) {
    while (writer_.flush() && produce()) {
    }
    if (writer_.idle()) return;
    wait_for_work();
  }
}

void Supervisor::wait_for_work() {
  std::vector<pollfd> wanted{{signals_, POLLIN, 0}};
  int timeout = -1;
  if (writer_.idle()) {
    for (const Rank& rank : ranks_) {
      for (const Stream& stream : rank.streams) {
        if (stream.fd >= 0) wanted.push_back({stream.fd, POLLIN, 0});
      }
    }
  } else if (writer_.reader_gone()) {
    timeout = kReaderPollMs;  // poll would report the missing reader at once, and for ever
  } else {
    wanted.push_back({writer_.fd(), POLLOUT, 0});
  }
  if (kill_at_ms_) {
    const auto left = static_cast<int>(std::clamp<std::int64_t>(*kill_at_ms_ - monotonic_ms(), 0, 3'600'000));
    timeout = timeout < 0 ? left : std::min(timeout, left);
  }
  poll(wanted.data(), wanted.size(), timeout);
  take_signals();
}

}  // namespace moorage
