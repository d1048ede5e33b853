#include "control.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "bulk.h"
#include "channel.h"
#include "contexts.h"
#include "gate.h"
#include "quiesce.h"
#include "status.h"
#include "thread.h"

namespace moorage::control {
namespace {

constexpr char kDefaultPath[] = "/.moorage-gpu/gpu.sock";
constexpr auto kAnswerTime = std::chrono::seconds(30);
constexpr int kReconnectMs = 20;
// Exporting a descriptor costs the driver as much as allocating, and both wait for each other: what is freed within this
// time, and before the broker asks for the status, is never exported.
constexpr std::int64_t kFreshNs = 500'000'000;
// What was given back is wanted by others: told so soon, in batches.
constexpr std::int64_t kForgottenNs = 20'000'000;

struct State {
  std::mutex mutex;  // of all members; held while something is sent
  std::condition_variable changed;
  bool started = false;
  std::string path;
  int socket = -1;
  int wake = -1;
  std::uint64_t incarnation = 0;
  std::uint64_t next_request = 1;
  std::map<std::uint64_t, Reply*> asked;  // waiting for an answer
};
alignas(State) unsigned char storage[sizeof(State)];
State& state() {
  static State* const one = new (storage) State;  // never destroyed
  return *one;
}
std::atomic<bool> has_broker{false};
std::atomic<std::uint64_t> own_process{0};
std::atomic<int> wake_fd{-1};
std::atomic<bool> fresh_waiting{false};
std::atomic<bool> forgotten_waiting{false};
// Held while news are told, and while a connection begins: nothing may be told before the broker was greeted.
std::mutex& telling = *new std::mutex;

// Only the control thread touches these.
std::uint64_t quiesce_request = 0;  // to be answered when the try has ended; 0: none
std::int64_t quiesce_deadline_ns = 0;
channel::Identity left_socket;  // whose connection was closed because the memory was evicted

bool send(wire::Type type, std::uint64_t request, const void* body, std::size_t size, const std::string& text, int fd) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  return all.socket >= 0 && channel::send(all.socket, type, request, body, size, text, fd);
}

bool result(std::uint64_t request, std::int32_t status, const bulk::Totals& totals, const std::string& text) {
  const wire::Outcome outcome{status, totals.blocks, totals.bytes};
  return send(wire::Type::Result, request, &outcome, sizeof outcome, text, -1);
}

bool say_hello(int socket) {
  const bulk::Totals totals = bulk::totals();
  State& all = state();
  wire::Hello hello{.process = own_process.load(),
                    .incarnation = all.incarnation,
                    .pid = static_cast<std::uint32_t>(getpid()),
                    .level = static_cast<std::uint32_t>(gate::now()),
                    .evicted = totals.evicted ? 1U : 0U,
                    .blocks = totals.blocks,
                    .bytes = totals.bytes,
                    .name = {}};
  const int comm = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (comm >= 0) {
    const ssize_t length = read(comm, hello.name, sizeof hello.name - 1);
    if (length > 0 && hello.name[length - 1] == '\n') hello.name[length - 1] = '\0';
    close(comm);
  }
  return channel::send(socket, wire::Type::Hello, 0, &hello, sizeof hello, "", -1);
}

// False: the connection is gone; the next one is told everything anew. `fresh`: new blocks as well.
bool tell_news(bool fresh = true) {
  const std::lock_guard one_at_a_time(telling);
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    if (all.socket < 0) return false;
  }
  if (fresh) fresh_waiting = false;
  forgotten_waiting = false;
  wire::Memory memory{};
  int fd = -1;
  while (fresh && bulk::next_fresh(memory, fd)) {
    const bool sent = send(wire::Type::Memory, 0, &memory, sizeof memory, "", fd);
    if (fd >= 0) close(fd);
    if (!sent) return false;
  }
  wire::Block block{own_process.load(), 0};
  while (bulk::next_forgotten(block.id)) {
    if (!send(wire::Type::Forget, 0, &block, sizeof block, "", -1)) return false;
  }
  return true;
}

void end_connection() {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    if (all.socket >= 0) close(all.socket);
    all.socket = -1;
    all.asked.clear();
    all.changed.notify_all();
  }
  quiesce_request = 0;
}

// The broker went away. A job that still has its memory runs on; one that has not can only wait.
void lost() {
  end_connection();
  if (!bulk::totals().evicted) quiesce::cancel();
}

void quiesce_ended() { poke(); }

void start_quiesce(std::uint64_t request, std::uint64_t timeout_ms) {
  constexpr std::uint64_t kLongest = 3'600'000;
  if (quiesce_request != 0 || gate::now() != Level::Open) {
    result(request, wire::kWrongState, {}, "the gate is not open");
    return;
  }
  quiesce_deadline_ns =
      gate::boottime_ns() + static_cast<std::int64_t>(timeout_ms < kLongest ? timeout_ms : kLongest) * 1'000'000;
  if (!quiesce::begin(quiesce_deadline_ns, quiesce_ended)) {
    result(request, wire::kWrongState, {}, "an earlier try still waits for its device");
    return;
  }
  quiesce_request = request;
}

// False: the connection is gone.
bool look_at_quiesce() {
  if (quiesce_request == 0) return true;
  std::int32_t status = 0;
  switch (quiesce::state()) {
    case quiesce::State::Sealed: break;
    case quiesce::State::Running:
      if (gate::boottime_ns() < quiesce_deadline_ns) return true;
      quiesce::cancel();
      if (quiesce::state() == quiesce::State::Sealed) break;
      status = wire::kDeadline;
      break;
    case quiesce::State::Failed:
    case quiesce::State::Idle: status = wire::kDeadline; break;
  }
  const std::uint64_t request = quiesce_request;
  quiesce_request = 0;
  if (status != 0) return result(request, status, bulk::totals(), quiesce::why());
  {
    // What the job freed is not saved, and the broker must not count on it.
    const contexts::Any context;
    bulk::bury();
    bulk::give_back_freed();
  }
  // All that was allocated until now is told before the answer.
  return tell_news() && result(request, 0, bulk::totals(), "");
}

// False: the connection has ended, by the protocol or otherwise.
bool evict(std::uint64_t request) {
  if (quiesce::state() != quiesce::State::Sealed || gate::now() != Level::Sealed || bulk::totals().evicted) {
    return result(request, wire::kWrongState, {}, "the gate is not sealed, or the memory is gone already");
  }
  bulk::Totals done;
  std::string why;
  const contexts::Any context;
  const CUresult bad = bulk::evict(done, why);
  if (bad != CUDA_SUCCESS) return result(request, bad, done, why);
  // No descriptor may cross a dump: there is no connection until the socket has been bound anew.
  left_socket = channel::identity(state().path.c_str());
  result(request, 0, done, "");
  end_connection();
  return false;
}

bool resume(std::uint64_t request) {
  if (bulk::totals().evicted) return result(request, wire::kWrongState, {}, "the memory is not mapped");
  quiesce::cancel();
  return result(request, 0, bulk::totals(), "");
}

bool map(std::uint64_t request) {
  if (!bulk::totals().evicted) return result(request, wire::kWrongState, {}, "the memory was not evicted");
  bulk::Totals done;
  std::string why;
  const contexts::Any context;
  const std::int32_t bad = bulk::map_all(done, why);
  return result(request, bad, done, why);
}

bool adopt(std::uint64_t request, const wire::Block& block, int fd) {
  if (fd < 0) return result(request, wire::kMalformed, {}, "Adopt without a descriptor");
  const contexts::Any context;
  return result(request, bulk::adopt(block.id, fd), {}, "");
}

void answered(std::uint64_t request, const wire::Found& found, int fd) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto waiting = all.asked.find(request);
  if (waiting == all.asked.end()) {
    if (fd >= 0) close(fd);
    return;
  }
  *waiting->second = {true, found, fd};
  all.asked.erase(waiting);
  all.changed.notify_all();
}

template <typename Body>
bool body_of(const channel::Packet& packet, Body& body) {
  if (packet.header.length < sizeof body) return false;
  std::memcpy(&body, packet.body, sizeof body);
  return true;
}

// False: the connection is gone.
bool handle(const channel::Packet& packet) {
  const std::uint64_t request = packet.header.request;
  int fd = packet.descriptor;
  bool well = true;
  bool malformed = false;
  switch (packet.header.type) {
    case wire::Type::Welcome: {
      wire::Welcome welcome{};
      State& all = state();
      const std::lock_guard lock(all.mutex);
      if (body_of(packet, welcome)) all.incarnation = welcome.incarnation;
      break;
    }
    case wire::Type::Quiesce: {
      wire::Quiesce wanted{};
      malformed = !body_of(packet, wanted);
      if (!malformed) start_quiesce(request, wanted.timeout_ms);
      break;
    }
    case wire::Type::Evict: well = evict(request); break;
    case wire::Type::Adopt: {
      wire::Block block{};
      malformed = !body_of(packet, block);
      if (!malformed) {
        well = adopt(request, block, fd);
        fd = -1;
      }
      break;
    }
    case wire::Type::Map: well = map(request); break;
    case wire::Type::Resume: well = resume(request); break;
    case wire::Type::Status:
      well = tell_news() && result(request, 0, bulk::totals(), status_text());
      break;
    case wire::Type::Answer: {
      wire::Found found{};
      if (body_of(packet, found)) {
        answered(request, found, fd);
        fd = -1;
      }
      break;
    }
    default: malformed = true;
  }
  if (fd >= 0) close(fd);
  if (malformed) well = result(request, wire::kMalformed, {}, "a message that is not understood");
  return well;
}

void serve(int socket, int wake) {
  pollfd wanted[2] = {{socket, POLLIN, 0}, {wake, POLLIN, 0}};
  std::int64_t tell_at = gate::boottime_ns();  // all news; 0: there are none
  std::int64_t forget_at = 0;
  for (;;) {
    if (tell_at == 0 && fresh_waiting) tell_at = gate::boottime_ns() + kFreshNs;
    if (forget_at == 0 && forgotten_waiting) forget_at = gate::boottime_ns() + kForgottenNs;
    const bool all_news = tell_at != 0 && gate::boottime_ns() >= tell_at;
    if (all_news || (forget_at != 0 && gate::boottime_ns() >= forget_at)) {
      forget_at = 0;
      if (all_news) tell_at = 0;
      if (!tell_news(all_news)) return lost();
    }
    if (!look_at_quiesce()) return lost();
    int timeout = -1;
    for (const std::int64_t until : {tell_at, forget_at, quiesce_request == 0 ? 0 : quiesce_deadline_ns}) {
      if (until == 0) continue;
      const std::int64_t left = (until - gate::boottime_ns()) / 1'000'000 + 1;
      const int left_ms = static_cast<int>(left < 0 ? 0 : left);
      timeout = timeout < 0 || left_ms < timeout ? left_ms : timeout;
    }
    if (poll(wanted, 2, timeout) < 0) continue;
    std::uint64_t count = 0;
    if (wanted[1].revents != 0 && read(wake, &count, sizeof count) < 0) continue;
    if (wanted[0].revents == 0) continue;
    channel::Packet packet;
    if (!channel::receive(socket, packet)) return lost();
    if (!handle(packet)) {
      if (state().socket >= 0) lost();
      return;
    }
  }
}

void* run(void*) {
  pthread_setname_np(pthread_self(), "moorage-gpu");
  State& all = state();
  for (;;) {
    const bool too_early = bulk::totals().evicted && channel::identity(all.path.c_str()) == left_socket;
    const int socket = too_early ? -1 : channel::connect(all.path.c_str());
    if (socket < 0) {
      pollfd wake{all.wake, POLLIN, 0};
      poll(&wake, 0, kReconnectMs);  // nothing that happens here can make the broker come sooner
      continue;
    }
    bool greeted = false;
    {
      const std::lock_guard one_at_a_time(telling);
      bulk::announce_all();
      greeted = say_hello(socket);
      const std::lock_guard lock(all.mutex);
      all.socket = socket;
      if (greeted) all.changed.notify_all();
    }
    if (greeted) {
      serve(socket, all.wake);
    } else {
      lost();
    }
  }
}

}  // namespace

void start() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (all.started) return;
  all.started = true;
  const char* path = std::getenv("MOORAGE_GPU_SOCKET");
  all.path = path != nullptr && *path != '\0' ? path : kDefaultPath;
  if (access(all.path.c_str(), F_OK) != 0) return;
  own_process = random_number();
  all.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wake_fd = all.wake;
  if (all.wake >= 0) has_broker = start_thread(run);
}

bool active() { return has_broker.load(std::memory_order_relaxed); }

bool connected() {
  if (!active()) return false;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  return all.socket >= 0;
}

std::uint64_t process() { return own_process.load(std::memory_order_relaxed); }

void new_block() {
  if (!fresh_waiting.exchange(true)) poke();
}

void block_went() {
  if (!forgotten_waiting.exchange(true)) poke();
}

void tell_now() {
  if (active()) tell_news();
}

void poke() {
  const std::uint64_t one = 1;
  const int fd = wake_fd.load(std::memory_order_relaxed);
  if (fd >= 0 && write(fd, &one, sizeof one) < 0) return;  // full: it is awake
}

Reply ask(wire::Type type, std::uint64_t of_process, std::uint64_t id, int descriptor) {
  Reply reply;
  if (!active()) return reply;
  State& all = state();
  const auto until = std::chrono::steady_clock::now() + kAnswerTime;
  std::unique_lock lock(all.mutex);
  if (!all.changed.wait_until(lock, until, [&] { return all.socket >= 0; })) return reply;
  const std::uint64_t request = all.next_request++;
  const wire::Block block{of_process, id};
  all.asked[request] = &reply;
  if (!channel::send(all.socket, type, request, &block, sizeof block, "", descriptor)) {
    all.asked.erase(request);
    return reply;
  }
  all.changed.wait_until(lock, until, [&] { return !all.asked.contains(request); });
  all.asked.erase(request);
  return reply;
}

void before_fork() { state().mutex.lock(); }
void after_fork_in_parent() { state().mutex.unlock(); }

void after_fork_in_child() {
  State& all = state();
  if (all.socket >= 0) close(all.socket);
  if (all.wake >= 0) close(all.wake);
  all.mutex.unlock();
  new (storage) State;
  has_broker = false;
  own_process = 0;
  wake_fd = -1;
  fresh_waiting = false;
  forgotten_waiting = false;
  new (&telling) std::mutex;
  quiesce_request = 0;
  quiesce::after_fork_in_child();
}

}  // namespace moorage::control
