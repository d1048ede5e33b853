#include "comm.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <map>
#include <new>

#include "create.h"
#include "cuda.h"
#include "graphs.h"
#include "library.h"
#include "real.h"

namespace moorage::nccl {

thread_local constinit unsigned Inside::depth __attribute__((tls_model("initial-exec"))) = 0;

// ---- configurations

namespace {

// Where the structures of nccl.h have pointers to texts.
constexpr std::size_t kNetName = 32;
constexpr std::size_t kBlocking = offsetof(ConfigHead, blocking);
constexpr std::size_t kAlgorithm = 40;
constexpr std::size_t kLongest = 4096;
constexpr unsigned kFirstNamed = 22700;

// The ncclConfig_t of NCCL 2.27 up to the name, with nothing said.
struct NamedConfig {
  ConfigHead head{};
  char unsaid[Config::kCommName - sizeof(ConfigHead)]{};
  const char* name = nullptr;
};
static_assert(sizeof(NamedConfig) == Config::kCommName + sizeof(char*));

std::vector<char> nothing_said() {
  const int version = library::version();
  if (version < static_cast<int>(kFirstNamed)) return {};
  std::vector<char> bytes(sizeof(NamedConfig));
  const NamedConfig empty;
  std::memcpy(bytes.data(), &empty, sizeof empty);
  const ConfigHead head{sizeof(NamedConfig), kMagic, static_cast<unsigned>(version), kUndefined};
  std::memcpy(bytes.data(), &head, sizeof head.size + sizeof head.magic + sizeof head.version);
  constexpr std::size_t kNumbers[] = {16, 20, 24, 28, 40, 44};
  for (const std::size_t at : kNumbers) std::memcpy(bytes.data() + at, &kUndefined, sizeof kUndefined);
  return bytes;
}

std::vector<char> copied(const void* given) {
  if (given == nullptr) return {};
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  if (size < sizeof(ConfigHead) || size > kLongest) return {};
  const auto* bytes = static_cast<const char*>(given);
  return {bytes, bytes + size};
}

}  // namespace

void Config::keep(std::size_t offset) {
  if (offset + sizeof(char*) > bytes_.size()) return;
  const char* text = nullptr;
  std::memcpy(&text, bytes_.data() + offset, sizeof text);
  if (text == nullptr) return;
  texts_.push_back(std::make_shared<std::string>(text));
  text = texts_.back()->c_str();
  std::memcpy(bytes_.data() + offset, &text, sizeof text);
}

Config Config::communicator(const void* given) {
  Config made;
  made.bytes_ = given == nullptr ? nothing_said() : copied(given);
  made.keep(kNetName);
  made.keep(kCommName);
  made.be_named();
  return made;
}

void Config::be_named() {
  if (bytes_.size() < sizeof(NamedConfig) || name() != nullptr) return;
  texts_.push_back(std::make_shared<std::string>("moorage"));
  const char* text = texts_.back()->c_str();
  std::memcpy(bytes_.data() + kCommName, &text, sizeof text);
}

const char* Config::name() const {
  const char* text = nullptr;
  if (bytes_.size() >= sizeof(NamedConfig)) std::memcpy(&text, bytes_.data() + kCommName, sizeof text);
  return text;
}

Config Config::collective(const void* given) {
  Config made;
  made.bytes_ = copied(given);
  made.keep(kAlgorithm);
  return made;
}

bool Config::blocking() const {
  int value = kUndefined;
  if (bytes_.size() >= kBlocking + sizeof value) std::memcpy(&value, bytes_.data() + kBlocking, sizeof value);
  return value != 0;
}

void* Config::unblocked(std::vector<char>& scratch) const {
  if (bytes_.empty()) {
    constexpr ConfigHead least{sizeof(ConfigHead), kMagic, kFirstConfigVersion, 0};
    scratch.resize(sizeof least);
    std::memcpy(scratch.data(), &least, sizeof least);
  } else {
    scratch = bytes_;
  }
  constexpr int no = 0;
  std::memcpy(scratch.data() + kBlocking, &no, sizeof no);
  return scratch.data();
}

// ---- handles

std::vector<Comm*>& comms() {
  alignas(std::vector<Comm*>) static unsigned char storage[sizeof(std::vector<Comm*>)];
  static auto* const all = new (storage) std::vector<Comm*>;  // never destroyed
  return *all;
}

int reduction_of(const Comm* comm, int handle) {
  if (comm == nullptr || handle < kBuiltInReductions) return handle;
  const Gate::Lock lock(gate().mutex);
  for (const Reduction& one : comm->reductions) {
    if (one.handle == handle) return one.real;
  }
  return handle;
}

void* window_of(const Comm* comm, void* handle) {
  const Gate::Lock lock(gate().mutex);
  const auto look = [handle](const Comm& one) -> const Window* {
    for (const Window& window : one.windows) {
      if (window.handle == handle) return &window;
    }
    return nullptr;
  };
  if (comm != nullptr) {
    const Window* window = look(*comm);
    return window == nullptr ? handle : window->real;
  }
  for (const Comm* one : comms()) {
    if (const Window* window = look(*one)) return window->real;
  }
  return handle;
}

// ---- what cannot be carried over

namespace {

std::set<std::string>& refused_here() {
  static auto* const all = new std::set<std::string>;
  return *all;
}

const char* why(const std::string& api) {
  static const std::map<std::string, const char*> reasons{
      {"captured", "its calls were captured into a CUDA graph, and there is no libcuda proxy that could carry it over"},
      {"captured by halves", "a group was captured into several CUDA graphs, or only some of its calls were captured"},
      {"ncclCommGrow", "a communicator that was grown with an id from elsewhere has no name that all its members know"},
      {"ncclCommGetUniqueId", "an id was drawn to let it grow and nobody has used it yet: try again when it has grown"},
      {"ncclCommSuspend", "it is suspended: call ncclCommResume first"},
      {"ncclCommRevoke", "it was revoked"},
      {"ncclDevCommCreate", "a device-side communicator cannot be made anew behind a kernel's back"},
      {"NCCL_WIN_COLL_SYMMETRIC", "symmetric memory has addresses that change"},
      {"per-thread default stream", "nobody but its own thread can say whether it is dry"},
  };
  const auto found = reasons.find(api);
  if (found != reasons.end()) return found->second;
  if (api.find("Signal") != std::string::npos) return "one-sided operations cannot be counted";
  return "it hands out addresses that change";
}

}  // namespace

void refuse(Comm* comm, const char* api) {
  const Gate::Lock lock(gate().mutex);
  (comm == nullptr ? refused_here() : comm->refused).insert(api);
}

void accept(Comm* comm, const char* api) {
  const Gate::Lock lock(gate().mutex);
  (comm == nullptr ? refused_here() : comm->refused).erase(api);
}

std::vector<Refused> refusals() {
  std::vector<Refused> found;
  for (const std::string& api : refused_here()) found.push_back({"", api, why(api)});
  for (const Comm* comm : comms()) {
    if (comm->dead) continue;
    for (const std::string& api : comm->refused) found.push_back({std::string(comm->name()), api, why(api)});
  }
  graphs::add_refusals(found);
  return found;
}

// ---- calls that NCCL carries out by itself

void Pause::operator()() {
  const timespec pause{0, microseconds_ * 1000};
  nanosleep(&pause, nullptr);
  microseconds_ = std::min(2 * microseconds_, 1000L);
}

int finish(const Comm& comm) {
  Pause pause;
  for (;;) {
    {
      // Under the lock: another thread may abort the communicator, and then there is nothing left to ask.
      const Gate::Lock lock(gate().mutex);
      if (comm.dead || comm.real == nullptr) return kInternalError;
      int state = kSuccess;
      const int bad = real::ncclCommGetAsyncError(comm.real, &state);
      if (bad != kSuccess && bad != kInProgress) return bad;
      if (state != kInProgress) return state;
    }
    pause();
  }
}

void leave_later(Gate::Lock& lock, Call& call, std::vector<Lane> lanes, const std::vector<Comm*>& involved,
                 std::vector<Making> makings) {
  auto* stays = new Pending;
  stays->lanes = std::move(lanes);
  stays->creates.assign(call.creates.begin(), call.creates.end());
  stays->call.lanes = stays->lanes;
  stays->call.creates = stays->creates;
  stays->comms = involved;
  stays->makings = std::move(makings);
  gate().replace(lock, call, stays->call);
  for (Comm* comm : involved) comm->pending.push_back(stays);
}

void look_at_pending(Gate::Lock& lock, Comm& comm) {
  const auto waiting = comm.pending;
  for (Pending* one : waiting) {
    if (!one->makings.empty()) {
      create::look(lock, *one);
      continue;
    }
    bool over = true;
    for (const Comm* involved : one->comms) {
      int state = kSuccess;
      if (involved->real != nullptr) real::ncclCommGetAsyncError(involved->real, &state);
      over = over && state != kInProgress;
    }
    if (!over) continue;
    gate().leave(lock, one->call);
    for (Comm* involved : one->comms) std::erase(involved->pending, one);
    delete one;
  }
}

int settle(Call& call, int result, const std::vector<Comm*>& involved) {
  if (result == kInProgress) {
    const bool waits = std::all_of(involved.begin(), involved.end(), [](const Comm* comm) { return comm->blocking; });
    if (!waits) {
      Gate::Lock lock(gate().mutex);
      leave_later(lock, call, {call.lanes.begin(), call.lanes.end()}, involved);
      return kInProgress;
    }
    result = kSuccess;
    for (const Comm* comm : involved) {
      if (const int state = finish(*comm); state != kSuccess) result = state;
    }
  }
  gate().leave(call);
  return result;
}

}  // namespace moorage::nccl
