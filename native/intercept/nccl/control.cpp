#include "control.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "../channel.h"
#include "../thread.h"
#include "comm.h"
#include "create.h"
#include "cuda.h"
#include "destroy.h"
#include "graphs.h"
#include "library.h"
#include "msgpack.h"
#include "real.h"
#include "streams.h"
#include "wire.h"

namespace moorage::nccl::control {
namespace {

constexpr char kDefaultPath[] = "/.moorage-nccl/nccl.sock";
constexpr int kReconnectMs = 20;
constexpr std::int64_t kPatienceNs = 30'000'000'000;
constexpr std::chrono::seconds kWelcome{2};
constexpr std::size_t kMostToDo = 16;

struct State {
  std::mutex mutex;  // of all members; held while something is sent
  bool started = false;
  std::string path;
  int socket = -1;
  bool busy = false;  // commands that take long are carried out
  std::deque<std::pair<std::uint64_t, std::function<void()>>> todo;
  bool welcome = false;  // said by the worker, or there is none
  std::condition_variable welcomed;
  std::uint64_t process = 0;
  std::uint64_t incarnation = 0;
  std::int64_t rank = -1;
};
State& state() {
  alignas(State) static unsigned char storage[sizeof(State)];
  static State* const one = new (storage) State;  // never destroyed
  return *one;
}
std::atomic<bool> begun{false};

channel::Identity left_socket;  // only the control thread: the socket that it was told to part from

bool send_all(int socket, const std::string& body) {
  const wire::Header header{wire::kMagic, static_cast<std::uint32_t>(body.size())};
  std::string data(reinterpret_cast<const char*>(&header), sizeof header);
  data += body;
  for (std::size_t at = 0; at < data.size();) {
    const ssize_t sent = ::send(socket, data.data() + at, data.size() - at, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += static_cast<std::size_t>(sent);
  }
  return true;
}

bool send(msgpack::Writer& message) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  return all.socket >= 0 && send_all(all.socket, message.take());
}

bool done(std::uint64_t request) {
  msgpack::Writer out;
  out.array(2).number(wire::kDone).number(request);
  return send(out);
}

bool failed(std::uint64_t request, int status, std::string_view text) {
  msgpack::Writer out;
  out.array(4).number(wire::kFailed).number(request).integer(status).text(text);
  return send(out);
}

std::string own_name() {
  char name[16] = "";
  const int comm = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (comm < 0) return name;
  const ssize_t length = read(comm, name, sizeof name - 1);
  close(comm);
  if (length > 0 && name[length - 1] == '\n') name[length - 1] = '\0';
  return name;
}

bool say_hello() {
  msgpack::Writer out;
  const int version = library::version();
  {
    State& all = state();
    const std::lock_guard about(all.mutex);
    const Gate::Lock lock(gate().mutex);
    std::uint64_t living = 0;
    for (const Comm* comm : comms()) living += comm->dead ? 0 : 1;
    out.array(14).number(wire::kHello).number(wire::kVersion).number(all.process).number(all.incarnation);
    out.integer(all.rank).number(static_cast<std::uint64_t>(getpid())).text(own_name());
    out.integer(version).text(library::path()).number(gate().attempt).number(gate().round);
    out.number(static_cast<std::uint64_t>(gate().phase)).boolean(gate().torn).number(living);
  }
  return send(out);
}

// ---- commands

// Names of the streams that still have work of NCCL in them, or whatever keeps a cut from being accepted.
std::vector<std::string> undrained() {
  std::vector<std::string> found;
  {
    const Gate::Lock lock(gate().mutex);
    if (gate().phase != Phase::Drain || gate().torn) return found;
    // Without these nothing of the communicator could be carried over: better no cut than a wrong one.
    for (const Refused& one : refusals()) found.push_back(one.communicator + " " + one.api + ": " + one.why);
    if (const std::size_t captures = graphs::open(); captures > 0) {
      found.push_back(std::to_string(captures) + " captures with calls of NCCL have not ended");
    }
  }
  for (std::string& name : streams::busy()) found.push_back(std::move(name));
  return found;
}

bool obey(std::uint64_t request, msgpack::Reader& in) {
  Order order;
  order.attempt = in.number();
  order.round = in.number();
  order.phase = static_cast<Phase>(in.number());
  if (order.phase > Phase::Drain) throw msgpack::Malformed();
  for (std::size_t left = in.array(); left > 0; --left) order.admit.push_back(in.number());
  for (std::size_t left = in.array(); left > 0; --left) {
    if (in.array() != 5) throw msgpack::Malformed();
    Order::Wanted wanted;
    wanted.communicator = in.text();
    wanted.member = static_cast<int>(in.integer());
    wanted.kind = static_cast<Kind>(in.number());
    wanted.peer = static_cast<int>(in.integer());
    wanted.need = in.number();
    order.needs.push_back(std::move(wanted));
  }
  order.push = in.boolean();
  bool stale = false;
  bool opened = false;
  {
    Gate::Lock lock(gate().mutex);
    if (gate().torn && order.phase == Phase::Open) {
      lock.unlock();
      return failed(request, wire::kWrongState, "the communicators are gone");
    }
    opened = gate().phase != Phase::Open && order.phase == Phase::Open;
    stale = !gate().obey(lock, order);
  }
  if (opened && !stale) std::thread(create::begin_again).detach();
  const auto wet = stale ? std::vector<std::string>() : undrained();
  msgpack::Writer out;
  {
    Gate::Lock lock(gate().mutex);
    if (!gate().torn) {
      for (Comm* comm : comms()) look_at_pending(lock, *comm);
    }
    out.array(14).number(wire::kReport).number(request).boolean(stale);
    gate().report(out, wet);
  }
  return send(out);
}

bool prepare(std::uint64_t request) {
  msgpack::Writer out;
  {
    const Gate::Lock lock(gate().mutex);
    const auto found = refusals();
    out.array(3).number(wire::kPrepared).number(request).array(found.size());
    for (const Refused& one : found) out.array(3).text(one.communicator).text(one.api).text(one.why);
  }
  return send(out);
}

bool keep(std::uint64_t request, msgpack::Reader& in) {
  const std::uint64_t attempt = in.number();
  bool kept = false;
  {
    Gate::Lock lock(gate().mutex);
    kept = gate().keep(lock, attempt);
  }
  return kept ? done(request) : failed(request, wire::kWrongState, "the gate is not closed for this cut");
}

bool tell_status(std::uint64_t request) {
  std::string text;
  {
    const Gate::Lock lock(gate().mutex);
    std::size_t living = 0;
    for (const Comm* comm : comms()) living += comm->dead ? 0 : 1;
    text = R"({"communicators":)" + std::to_string(living) + R"(,"moves":)" + std::to_string(gate().moves) +
           R"(,"phase":)" + std::to_string(static_cast<int>(gate().phase)) + R"(,"torn":)" +
           (gate().torn ? "true" : "false") + "}";
  }
  msgpack::Writer out;
  out.array(3).number(wire::kStatusText).number(request).text(text);
  return send(out);
}

// Commands that take long are carried out beside the conversation, one after another. What is carried out is called off
// by the next one: whoever gives it does no longer wait for the other.
bool beside(std::uint64_t request, std::function<void()> work) {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    if (all.todo.size() < kMostToDo) {
      all.todo.emplace_back(rebuild::call_off(), std::move(work));
      if (std::exchange(all.busy, true)) return true;
      std::thread([&all] {
        pthread_setname_np(pthread_self(), "moorage-nccl");
        cuda::be_discreet();
        std::unique_lock one(all.mutex);
        while (!all.todo.empty()) {
          const auto [number, next] = std::move(all.todo.front());
          all.todo.pop_front();
          one.unlock();
          rebuild::begin(number);
          next();
          one.lock();
        }
        all.busy = false;
      }).detach();
      return true;
    }
  }
  return failed(request, wire::kWrongState, "too many earlier commands are still carried out");
}

void answer(std::uint64_t request, const rebuild::Outcome& outcome) {
  outcome.status == 0 ? done(request) : failed(request, outcome.status, outcome.text);
}

std::int64_t deadline_after(double seconds) {
  return rebuild::boottime_ns() + static_cast<std::int64_t>(seconds * 1e9);
}

std::vector<std::string> names_in(msgpack::Reader& in) {
  std::vector<std::string> names;
  for (std::size_t left = in.array(); left > 0; --left) names.emplace_back(in.text());
  return names;
}

rebuild::Named named_in(msgpack::Reader& in) {
  rebuild::Named named;
  for (std::size_t left = in.array(); left > 0; --left) {
    if (in.array() != 2) throw msgpack::Malformed();
    const std::string name(in.text());
    const std::string_view bytes = in.text();
    UniqueId id{};
    if (bytes.size() != sizeof id.internal) throw msgpack::Malformed();
    std::memcpy(id.internal, bytes.data(), sizeof id.internal);
    named.emplace_back(name, id);
  }
  return named;
}

constexpr std::size_t kLeastOfWelcome = 3;
constexpr std::size_t kLeastOfTeardown = 6;

bool tear_down(std::uint64_t request, msgpack::Reader& in, std::size_t fields) {
  const std::uint64_t attempt = in.number();
  auto again = names_in(in);
  auto widowed = names_in(in);
  const std::int64_t deadline = deadline_after(in.real());
  const bool abort = fields > kLeastOfTeardown && in.boolean();
  return beside(request, [=] { answer(request, rebuild::tear_down(attempt, again, widowed, deadline, abort)); });
}

bool make_anew(std::uint64_t request, msgpack::Reader& in) {
  in.number();  // the attempt
  auto communicators = named_in(in);
  auto again = named_in(in);
  const std::int64_t deadline = deadline_after(in.real());
  return beside(request, [=] { answer(request, rebuild::rebuild(communicators, again, deadline)); });
}

bool make_ids(std::uint64_t request, msgpack::Reader& in) {
  const std::size_t count = in.array();
  return beside(request, [=] {
    msgpack::Writer out;
    out.array(3).number(wire::kIds).number(request).array(count);
    rebuild::Outcome outcome;
    for (std::size_t i = 0; i < count && outcome.status == 0; ++i) {
      UniqueId id{};
      outcome.status = real::ncclGetUniqueId(&id);
      outcome.text = "ncclGetUniqueId answered " + std::to_string(outcome.status);
      out.bytes({id.internal, sizeof id.internal});
    }
    if (outcome.status != 0) return answer(request, outcome);
    send(out);
  });
}

// False: the connection has ended, by the protocol or otherwise.
bool handle(const std::string& body) {
  msgpack::Reader in(body);
  std::uint64_t request = 0;
  try {
    const std::size_t fields = in.array();
    const auto tag = in.integer();
    if (tag == wire::kWelcome) {
      State& all = state();
      const std::lock_guard lock(all.mutex);
      all.incarnation = in.number();
      all.rank = in.integer();
      if (fields > kLeastOfWelcome) {
        const auto renewed = named_in(in);
        const Gate::Lock about(gate().mutex);
        for (const auto& [name, id] : renewed) create::renew(name, id);
      }
      all.welcome = true;
      all.welcomed.notify_all();
      return true;
    }
    request = in.number();
    switch (tag) {
      case wire::kPrepare: return prepare(request);
      case wire::kObey: return obey(request, in);
      case wire::kTeardown: return tear_down(request, in, fields);
      case wire::kMakeIds: return make_ids(request, in);
      case wire::kRebuild: return make_anew(request, in);
      case wire::kStatus: return tell_status(request);
      case wire::kKeep: return keep(request, in);
      case wire::kPart:
        left_socket = channel::identity(state().path.c_str());
        done(request);
        return false;
      default: throw msgpack::Malformed();
    }
  } catch (const msgpack::Malformed& error) {
    return failed(request, wire::kMalformed, error.what());
  }
}

bool receive(int socket, std::string& body) {
  wire::Header header{};
  const auto read_all = [socket](void* into, std::size_t size) {
    for (std::size_t at = 0; at < size;) {
      const ssize_t got = recv(socket, static_cast<char*>(into) + at, size - at, MSG_WAITALL);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += static_cast<std::size_t>(got);
    }
    return true;
  };
  if (!read_all(&header, sizeof header) || header.magic != wire::kMagic || header.length > wire::kLongest) return false;
  body.resize(header.length);
  return read_all(body.data(), body.size());
}

void* run(void*) {
  pthread_setname_np(pthread_self(), "moorage-nccl");
  cuda::be_discreet();
  State& all = state();
  std::int64_t lost_at = 0;  // 0: nothing depends on the worker
  for (;;) {
    const bool too_early = left_socket == channel::identity(all.path.c_str());
    const int socket = too_early ? -1 : channel::connect(all.path.c_str(), SOCK_STREAM);
    if (socket < 0) {
      if (lost_at != 0 && rebuild::boottime_ns() - lost_at > kPatienceNs) {
        Gate::Lock lock(gate().mutex);
        gate().give_up(lock);
        lost_at = 0;
      }
      poll(nullptr, 0, kReconnectMs);  // nothing that happens here can make the worker come sooner
      continue;
    }
    left_socket = {.device = ~std::uint64_t{0}};
    {
      const std::lock_guard lock(all.mutex);
      all.socket = socket;
    }
    std::string body;
    if (say_hello()) {
      while (receive(socket, body) && handle(body)) {
      }
    }
    {
      const std::lock_guard lock(all.mutex);
      close(all.socket);
      all.socket = -1;
    }
    lost_at = rebuild::boottime_ns();
  }
}

}  // namespace

void start() {
  if (begun.load(std::memory_order_acquire)) return;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (all.started) return;
  all.started = true;
  begun.store(true, std::memory_order_release);
  const char* path = std::getenv("MOORAGE_NCCL_SOCKET");
  all.path = path != nullptr && *path != '\0' ? path : kDefaultPath;
  all.welcome = access(all.path.c_str(), F_OK) != 0;
  if (all.welcome) return;
  while (all.process == 0) all.process = random_number() >> 1U;  // every language has a place for it
  left_socket = {.device = ~std::uint64_t{0}};
  start_thread(run);
}

void await_welcome() {
  State& all = state();
  std::unique_lock lock(all.mutex);
  if (all.welcome || !all.started) return;
  all.welcomed.wait_for(lock, kWelcome, [&all] { return all.welcome; });
  all.welcome = true;  // once is enough
}

void before_fork() {
  state().mutex.lock();
  gate().mutex.lock();
}

void after_fork_in_parent() {
  gate().mutex.unlock();
  state().mutex.unlock();
}

// NCCL is of no use in a forked child; its own answers say so. Nobody there may wait at a gate that nobody opens.
void after_fork_in_child() {
  Gate& door = gate();
  door.phase = Phase::Open;
  door.torn = false;
  door.mutex.unlock();
  State& all = state();
  if (all.socket >= 0) close(all.socket);
  all.mutex.unlock();
  new (&all) State;
  begun.store(false);
}

}  // namespace moorage::nccl::control
