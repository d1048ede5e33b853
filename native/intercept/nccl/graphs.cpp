#include "graphs.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "../graphs/share.h"
#include "cuda.h"
#include "destroy.h"
#include "hooks.h"
#include "real.h"
#include "streams.h"

namespace moorage::nccl::graphs {
namespace {

using moorage::graphs::Owner;
using moorage::graphs::Table;

// One call that was captured, or one group.
struct Recorded {
  std::vector<Op> ops;
  std::vector<Reduction> reductions;  // of the job's own: it may destroy one as soon as the call has returned
  std::vector<Lane> lanes;
};
constexpr int kScalarOnHost = 1;
using Records = std::map<std::uint64_t, Recorded>;

// Under the gate's lock.
Records& records() {
  static auto* const all = new Records;
  return *all;
}

// Null: there is no libcuda proxy in this process.
const Table* table() {
  static std::atomic<const Table*> found{nullptr};
  const Table* known = found.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  known = static_cast<const Table*>(dlsym(driver, moorage::graphs::kSymbol));
  dlclose(driver);
  if (known == nullptr || known->version != moorage::graphs::kVersion) return nullptr;
  found.store(known, std::memory_order_release);
  return known;
}

// ---- launches

struct Launch {
  Call call;
  std::vector<Lane> lanes;
  bool counted = false;
};

void add_lane(std::vector<Lane>& lanes, const Lane& lane) {
  for (Lane& one : lanes) {
    if (one.member != lane.member || one.kind != lane.kind || one.peer != lane.peer) continue;
    one.number += lane.number;
    return;
  }
  lanes.push_back(lane);
}

void* launching(const std::uint64_t* parts, std::size_t count, void* stream) {
  auto* const launch = new Launch;
  Gate& door = gate();
  Gate::Lock lock(door.mutex);
  std::vector<Comm*> comms;
  for (std::size_t i = 0; i < count; ++i) {
    const auto found = records().find(parts[i]);
    if (found == records().end()) continue;
    for (const Lane& lane : found->second.lanes) add_lane(launch->lanes, lane);
    for (const Op& op : found->second.ops) {
      if (std::find(comms.begin(), comms.end(), op.comm) == comms.end()) comms.push_back(op.comm);
    }
  }
  launch->counted = !launch->lanes.empty();
  if (launch->counted) {
    launch->call.lanes = launch->lanes;
    door.enter(lock, launch->call);
  } else {
    door.enter_local(lock);
  }
  for (Comm* comm : comms) streams::note(*comm, stream);
  return launch;
}

void launched(void* handle) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(handle));
  Gate& door = gate();
  Gate::Lock lock(door.mutex);
  launch->counted ? door.leave(lock, launch->call) : door.leave_local(lock);
}

void forget(std::uint64_t part) {
  Records::node_type gone;
  const Gate::Lock lock(gate().mutex);
  gone = records().extract(part);
}

const Owner self{.launching = launching, .launched = launched, .forget = forget};

// ---- new captures

// A stream of ours for each stream that the calls were made on.
class Streams {
 public:
  bool add(void* original, void* context) {
    if (streams_.contains(original)) return true;
    cuda::set_context(context);
    void* made = cuda::fresh_stream();
    if (made == nullptr) return false;
    if (first_ == nullptr) first_ = made;
    streams_[original] = made;
    return true;
  }
  void* operator[](void* original) const { return streams_.at(original); }
  void* first() const { return first_; }
  // All of them into the capture of the first, and back.
  bool fork() const {
    return std::all_of(streams_.begin(), streams_.end(),
                       [&](const auto& one) { return one.second == first_ || cuda::wait_for(one.second, first_); });
  }
  bool join() const {
    return std::all_of(streams_.begin(), streams_.end(),
                       [&](const auto& one) { return one.second == first_ || cuda::wait_for(first_, one.second); });
  }
  Streams() = default;
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  ~Streams() {
    for (const auto& [original, made] : streams_) cuda::destroy_stream(made);
  }

 private:
  std::map<void*, void*> streams_;
  void* first_ = nullptr;
};

std::string answered(const char* what, int result) {
  const auto* text = static_cast<const char*>(real::ncclGetErrorString(result));
  return std::string(what) + " answered " + std::to_string(result) + " (" + (text == nullptr ? "?" : text) + ")";
}

std::string until_done(const std::vector<Op>& ops, std::int64_t deadline_ns) {
  Pause pause;
  for (const Op& op : ops) {
    for (;;) {
      int state = kSuccess;
      const int bad = real::ncclCommGetAsyncError(op.comm->real, &state);
      if (bad != kSuccess && bad != kInProgress) return answered("ncclCommGetAsyncError", bad);
      if (state == kSuccess) break;
      if (state != kInProgress) return answered("a captured call", state);
      if (rebuild::boottime_ns() >= deadline_ns) return "a captured call does not return: do all members have its graph?";
      pause();
    }
  }
  return "";
}

// The number of a reduction on the communicator as it is now.
int reduction_now(const Recorded& one, Op& op, std::vector<std::pair<int, Comm*>>& made) {
  if (op.reduction < kBuiltInReductions) return kSuccess;
  {
    const Gate::Lock lock(gate().mutex);
    for (const Reduction& known : op.comm->reductions) {
      if (known.handle == op.reduction) return kSuccess;
    }
  }
  for (const Reduction& kept : one.reductions) {
    if (kept.handle != op.reduction) continue;
    Reduction copy = kept;
    void* scalar = copy.residence == kScalarOnHost ? static_cast<void*>(copy.scalar) : copy.address;
    int fresh = 0;
    const int result = real::ncclRedOpCreatePreMulSum(&fresh, scalar, copy.type, copy.residence, op.comm->real);
    if (result != kSuccess) return result;
    made.emplace_back(fresh, op.comm);
    op.reduction = fresh;  // unknown to the job: passed on as it is
    return kSuccess;
  }
  return kInvalidArgument;
}

std::string capture_part(const Table& proxy, std::uint64_t part, Recorded& one, const Streams& streams, void* graph,
                         std::int64_t deadline_ns) {
  std::vector<Op> ops = one.ops;
  std::vector<std::pair<int, Comm*>> made;
  for (Op& op : ops) {
    op.stream = streams[op.stream];
    if (const int bad = reduction_now(one, op, made); bad != kSuccess) return answered("ncclRedOpCreatePreMulSum", bad);
  }
  cuda::set_context(ops.front().comm->context);
  void* const look = proxy.look(graph);
  int result = ops.size() == 1 ? issue(ops.front()) : issue_all(ops);
  std::string why;
  if (result == kInProgress || result == kSuccess) {
    why = until_done(ops, deadline_ns);
  } else {
    why = answered("a captured call", result);
  }
  proxy.again(look, part);
  for (const auto& [reduction, comm] : made) real::ncclRedOpDestroy(reduction, comm->real);
  return why;
}

struct Wanted {
  std::uint64_t capture;
  std::vector<std::uint64_t> parts;
};

// One after another, in the order in which they were captured.
struct Chain {
  std::vector<Comm*> comms;
  std::vector<Wanted> captures;
};

// Captures with a communicator in common belong to one chain. Others are made again at the same time: the first call on a
// communicator waits for all its members, and some of them may live in this process.
std::vector<Chain> chained(const std::vector<Wanted>& all) {
  std::vector<Chain> chains;
  const Gate::Lock lock(gate().mutex);
  for (const Wanted& one : all) {
    Chain here{{}, {one}};
    for (const std::uint64_t part : one.parts) {
      const auto found = records().find(part);
      if (found == records().end()) continue;
      for (const Op& op : found->second.ops) here.comms.push_back(op.comm);
    }
    for (auto chain = chains.begin(); chain != chains.end();) {
      const bool common = std::any_of(chain->comms.begin(), chain->comms.end(), [&](Comm* comm) {
        return std::find(here.comms.begin(), here.comms.end(), comm) != here.comms.end();
      });
      if (!common) {
        ++chain;
        continue;
      }
      here.comms.insert(here.comms.end(), chain->comms.begin(), chain->comms.end());
      here.captures.insert(here.captures.end(), chain->captures.begin(), chain->captures.end());
      chain = chains.erase(chain);
    }
    std::sort(here.comms.begin(), here.comms.end());
    here.comms.erase(std::unique(here.comms.begin(), here.comms.end()), here.comms.end());
    std::sort(here.captures.begin(), here.captures.end(),
              [](const Wanted& a, const Wanted& b) { return a.capture < b.capture; });
    chains.push_back(std::move(here));
  }
  return chains;
}

std::string capture_again(const Table& proxy, const Wanted& wanted, std::int64_t deadline_ns) {
  std::vector<Recorded> all;
  Streams streams;
  bool lost = false;
  {
    const Gate::Lock lock(gate().mutex);
    for (const std::uint64_t part : wanted.parts) {
      const auto found = records().find(part);
      if (found == records().end()) return "";  // its last graph has just gone
      all.push_back(found->second);
      for (const Op& op : all.back().ops) {
        lost = lost || op.comm->dead;
        if (op.comm->dead || op.comm->real != nullptr) continue;
        return "communicator " + std::string(op.comm->name()) + " was not among those to be made anew";
      }
    }
  }
  if (lost) return proxy.lose(wanted.capture), "";
  for (const Recorded& one : all) {
    for (const Op& op : one.ops) {
      if (!streams.add(op.stream, op.comm->context)) return "there is no stream to capture on";
    }
  }
  cuda::set_context(all.front().ops.front().comm->context);
  if (!cuda::begin_capture(streams.first())) return "a capture cannot be begun";
  void* graph = proxy.graph_of(streams.first());
  std::string why = graph != nullptr && streams.fork() ? "" : "streams cannot be captured together";
  for (std::size_t i = 0; i < all.size() && why.empty(); ++i) {
    why = capture_part(proxy, wanted.parts[i], all[i], streams, graph, deadline_ns);
  }
  if (why.empty() && !streams.join()) why = "captured streams cannot be joined";
  void* made = nullptr;
  if (!cuda::end_capture(streams.first(), &made) && why.empty()) why = "the capture became invalid";
  if (!why.empty()) {
    if (made != nullptr) cuda::destroy_graph(made);
    return why;
  }
  char text[400] = "";
  return proxy.renew(wanted.capture, made, text, sizeof text) ? "" : std::string(text);
}

// The lanes that a launch of these calls counts on.
std::vector<Lane> lanes_of(const std::vector<Op>& ops) {
  std::vector<Lane> lanes;
  for (const Op& op : ops) {
    if (const Lane lane = lane_of(op); lane.member != nullptr) add_lane(lanes, lane);
  }
  return lanes;
}

}  // namespace

Capturing::Capturing(std::span<const Op> ops) {
  const Table* proxy = table();
  std::vector<const Op*> captured;
  void* graph = nullptr;
  bool one_graph = true;
  for (const Op& op : ops) {
    if (!has_stream(op.what)) continue;
    void* const into = proxy == nullptr ? nullptr : proxy->graph_of(op.stream);
    if (!captured.empty() && into != graph) one_graph = false;
    graph = into;
    captured.push_back(&op);
  }
  if (proxy == nullptr || !one_graph || graph == nullptr) {
    for (const Op* op : captured) refuse(op->comm, proxy == nullptr ? "captured" : "captured by halves");
    return;
  }
  for (const Op* op : captured) {
    ops_.push_back(*op);
    if (op->given == nullptr) continue;
    ops_.back().config = Config::collective(op->given);
    ops_.back().given = nullptr;
  }
  look_ = proxy->look(graph);
}

void Capturing::ended(int result) {
  if (look_ == nullptr) return;
  // Under the gate's lock, so that nobody forgets it before it is remembered.
  const Gate::Lock lock(gate().mutex);
  const std::uint64_t part = table()->captured(std::exchange(look_, nullptr), &self, result == kSuccess);
  if (part == 0) return;
  Recorded one;
  one.lanes = lanes_of(ops_);
  for (const Op& op : ops_) {
    for (const Reduction& known : op.comm->reductions) {
      if (known.handle == op.reduction) one.reductions.push_back(known);
    }
  }
  one.ops = std::move(ops_);
  records().emplace(part, std::move(one));
}

std::size_t open() {
  const Table* proxy = table();
  return proxy == nullptr ? 0 : proxy->open();
}

void add_refusals(std::vector<Refused>& found) {
  const Table* proxy = table();
  if (proxy == nullptr) return;
  proxy->refusals(&self, &found, [](void* context, std::uint64_t part, const char* why) {
    const auto record = records().find(part);
    const bool known = record != records().end() && !record->second.ops.empty();
    static_cast<std::vector<Refused>*>(context)->push_back(
        {known ? std::string(record->second.ops.front().comm->name()) : "", "CUDA graph", why});
  });
}

void release() {
  if (const Table* proxy = table()) proxy->release(&self);
}

std::string make_anew(std::int64_t deadline_ns) {
  const Table* proxy = table();
  if (proxy == nullptr) return "";
  std::vector<Wanted> all;
  proxy->captures(&self, &all,
                  [](void* context, std::uint64_t capture, const std::uint64_t* parts, std::size_t count) {
                    static_cast<std::vector<Wanted>*>(context)->push_back({capture, {parts, parts + count}});
                  });
  if (all.empty()) return "";
  void* const before = cuda::current_context();
  const auto chains = chained(all);
  std::vector<std::string> troubles(chains.size());
  const auto work = [&](std::size_t i) {
    cuda::be_discreet();
    for (const Wanted& one : chains[i].captures) {
      troubles[i] = capture_again(*proxy, one, deadline_ns);
      if (!troubles[i].empty()) return;
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < chains.size(); ++i) threads.emplace_back(work, i);
  work(0);
  for (auto& thread : threads) thread.join();
  std::string why;
  for (const std::string& one : troubles) why = why.empty() ? one : why;
  char text[400] = "";
  if (why.empty() && !proxy->instantiate(&self, text, sizeof text)) why = text;
  cuda::set_context(before);
  return why;
}

}  // namespace moorage::nccl::graphs
