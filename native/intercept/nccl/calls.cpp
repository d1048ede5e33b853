// The operations, alone and in groups.
#include <algorithm>
#include <optional>
#include <utility>

#include "create.h"
#include "cuda.h"
#include "destroy.h"
#include "graphs.h"
#include "hooks.h"
#include "real.h"
#include "record.h"
#include "register.h"
#include "streams.h"

namespace moorage::nccl {
namespace {

struct Group {
  unsigned depth = 0;
  std::vector<Op> ops;
  std::vector<Making> makings;
};
thread_local Group group;

}  // namespace

// The lane of an operation; no member: it issues nothing that is counted.
Lane lane_of(const Op& op) {
  Member* member = op.comm->member;
  switch (op.what) {
    case What::Send:
    case What::Recv: {
      const bool known = member != nullptr && op.peer >= 0 && op.peer < op.comm->size;
      return {known ? member : nullptr, op.what == What::Send ? Kind::Send : Kind::Receive, op.peer};
    }
    case What::RedOpDestroy:
    case What::Finalize:
    case What::Destroy:
    case What::Abort: return {nullptr, Kind::Collective, -1};
    default: return {member, Kind::Collective, -1};
  }
}

namespace {

bool destroys(What what) { return what == What::Finalize || what == What::Destroy || what == What::Abort; }

}  // namespace

// Hand it to NCCL.
int issue(Op& op) {
  Comm& comm = *op.comm;
  void* const real = comm.real;
  void* const config = op.given != nullptr ? op.given : op.config.get();
  auto* const send = const_cast<void*>(op.send);
  const auto reduction = [&] { return reduction_of(&comm, op.reduction); };
#define EITHER(name, ...) \
  return op.configured ? real::name##Config(__VA_ARGS__, config) : real::name(__VA_ARGS__)
  switch (op.what) {
    case What::AllGather: EITHER(ncclAllGather, send, op.receive, op.count, op.type, real, op.stream);
    case What::AllReduce: EITHER(ncclAllReduce, send, op.receive, op.count, op.type, reduction(), real, op.stream);
    case What::AlltoAll: EITHER(ncclAlltoAll, send, op.receive, op.count, op.type, real, op.stream);
    case What::Bcast: return real::ncclBcast(op.receive, op.count, op.type, op.peer, real, op.stream);
    case What::Broadcast: EITHER(ncclBroadcast, send, op.receive, op.count, op.type, op.peer, real, op.stream);
    case What::Gather: EITHER(ncclGather, send, op.receive, op.count, op.type, op.peer, real, op.stream);
    case What::Reduce:
      EITHER(ncclReduce, send, op.receive, op.count, op.type, reduction(), op.peer, real, op.stream);
    case What::ReduceScatter:
      EITHER(ncclReduceScatter, send, op.receive, op.count, op.type, reduction(), real, op.stream);
    case What::Scatter: EITHER(ncclScatter, send, op.receive, op.count, op.type, op.peer, real, op.stream);
    case What::Send: return real::ncclSend(send, op.count, op.type, op.peer, real, op.stream);
    case What::Recv: return real::ncclRecv(op.receive, op.count, op.type, op.peer, real, op.stream);
    case What::WindowRegister: return registered::window(comm, op.receive, op.count, op.flags, op.out);
    case What::RedOpDestroy: return registered::drop_reduction(comm, op.reduction);
    case What::Finalize: return destroy::finalize(comm);
    case What::Destroy: return destroy::destroy(comm);
    case What::Abort: return destroy::abort(comm);
  }
#undef EITHER
  return kInternalError;
}

namespace {

// Waited for also where the job does not: only then are its nodes there.
int captured(Op& op) {
  const Local local;
  graphs::Capturing capturing({&op, 1});
  int result = issue(op);
  if (result == kInProgress) result = finish(*op.comm);
  capturing.ended(result);
  return result;
}

int carry_out(Op&& op) {
  Comm& comm = *op.comm;
  if (group.depth > 0) {
    op.config = Config::collective(op.given);
    op.given = nullptr;
    group.ops.push_back(std::move(op));
    return kSuccess;
  }
  if (has_stream(op.what) && cuda::capturing(op.stream)) return captured(op);
  const Lane lane = lane_of(op);
  if (lane.member == nullptr) {
    const Local local;
    const int result = issue(op);
    return result == kInProgress && comm.blocking ? finish(comm) : result;
  }
  streams::Detour detour;
  if (has_stream(op.what)) op.stream = detour.through(comm, op.stream);
  Call call;
  call.lanes = {&lane, 1};
  Gate& door = gate();
  {
    Gate::Lock lock(door.mutex);
    door.enter(lock, call);
    if (has_stream(op.what)) streams::note(comm, op.stream);
    if (comm.dead || comm.real == nullptr) {
      door.leave(lock, call);
      return kInvalidUsage;
    }
  }
  detour.leave();
  int result = issue(op);
  if (result == kInProgress) [[unlikely]] {
    if (!detour.taken()) return settle(call, result, {&comm});
    result = finish(comm);  // only then its end can be waited for
  }
  detour.join();
  door.leave(call);
  return result;
}

int collective(What what, const void* send, void* receive, std::size_t count, int type, int reduction, int root,
               void* handle, void* stream, bool configured = false, void* config = nullptr) {
  Op op{.what = what, .comm = of(handle), .send = send, .receive = receive, .count = count, .type = type,
        .reduction = reduction, .peer = root, .stream = stream, .configured = configured, .given = config};
  if (op.comm != nullptr) [[likely]] return carry_out(std::move(op));
  Comm foreign;  // a null handle, or one of NCCL's own: NCCL says what is wrong with it
  foreign.real = handle;
  op.comm = &foreign;
  return issue(op);
}

std::vector<Comm*> involved_in(const std::vector<Op>& ops) {
  std::vector<Comm*> found;
  for (const Op& op : ops) {
    if (!destroys(op.what) && std::find(found.begin(), found.end(), op.comm) == found.end()) found.push_back(op.comm);
  }
  return found;
}

}  // namespace

// All of a group, within a group of NCCL's.
int issue_all(std::vector<Op>& ops) {
  real::ncclGroupStart();
  int result = kSuccess;
  for (Op& op : ops) {
    result = issue(op);
    if (result != kSuccess && result != kInProgress) break;
  }
  const int end = real::ncclGroupEnd();
  return result == kSuccess || result == kInProgress ? end : result;
}

namespace {

int finish_all(const std::vector<Comm*>& involved) {
  int result = kSuccess;
  for (const Comm* comm : involved) {
    if (const int state = finish(*comm); state != kSuccess) result = state;
  }
  return result;
}

int end_uncounted(std::vector<Op>& ops, const std::vector<Comm*>& involved, bool is_captured) {
  const Local local;
  std::optional<graphs::Capturing> capturing;
  if (is_captured) capturing.emplace(ops);
  int result = issue_all(ops);
  if (result != kInProgress) {
    if (capturing) capturing->ended(result);
    return result;
  }
  for (const Comm* comm : involved) {
    if (!comm->blocking && !is_captured) return kInProgress;
  }
  result = finish_all(involved);
  if (capturing) capturing->ended(result);
  return result;
}

int end_ops(std::vector<Op>& ops) {
  const auto involved = involved_in(ops);
  const bool is_captured =
      std::any_of(ops.begin(), ops.end(), [](const Op& op) { return has_stream(op.what) && cuda::capturing(op.stream); });
  std::vector<Lane> lanes;
  bool ends = false;
  for (const Op& op : ops) {
    ends = ends || destroys(op.what);
    const Lane lane = lane_of(op);
    if (lane.member == nullptr) continue;
    if (!lanes.empty() && lanes.back().member == lane.member && lanes.back().kind == lane.kind &&
        lanes.back().peer == lane.peer) {
      ++lanes.back().number;
    } else {
      lanes.push_back(lane);
    }
  }
  if (is_captured || (lanes.empty() && !ends)) {
    const int result = end_uncounted(ops, involved, is_captured);
    registered::settle_windows(involved);
    return result;
  }
  streams::Detour detour;
  for (Op& op : ops) {
    if (has_stream(op.what)) op.stream = detour.through(*op.comm, op.stream);
  }
  Call call;
  call.lanes = lanes;
  call.destroys = lanes.empty();
  Gate& door = gate();
  {
    Gate::Lock lock(door.mutex);
    door.enter(lock, call);
    bool usable = true;
    for (const Op& op : ops) {
      if (has_stream(op.what)) streams::note(*op.comm, op.stream);
      usable = usable && !op.comm->dead && op.comm->real != nullptr;
    }
    if (!usable) {
      door.leave(lock, call);
      return kInvalidUsage;
    }
    for (const Op& op : ops) {
      if (destroys(op.what)) destroy::begin(lock, *op.comm);
    }
  }
  detour.leave();
  int result = issue_all(ops);
  if (result == kInProgress && detour.taken()) result = finish_all(involved);
  detour.join();
  result = settle(call, result, involved);
  registered::settle_windows(involved);
  for (const Op& op : ops) {
    if (destroys(op.what)) destroy::ended(*op.comm, op.what != What::Finalize);
  }
  return result;
}

}  // namespace

namespace record {

unsigned depth() { return group.depth; }
void add(Op&& op) { group.ops.push_back(std::move(op)); }
void add(Making&& making) { group.makings.push_back(std::move(making)); }

}  // namespace record

namespace hook {

int ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (group.depth == 0) return real::ncclGroupEnd();  // which says what is wrong
  if (--group.depth > 0) return kSuccess;
  auto ops = std::exchange(group.ops, {});
  auto makings = std::exchange(group.makings, {});
  int result = kSuccess;
  if (!makings.empty()) result = create::make(makings, true);
  if (!ops.empty() && (result == kSuccess || result == kInProgress)) {
    const int bad = end_ops(ops);
    if (bad != kSuccess) result = bad;
  }
  return result;
}

int ncclGroupSimulateEnd(void* info) {
  if (group.depth == 0) return real::ncclGroupSimulateEnd(info);
  group.depth = 0;
  auto ops = std::exchange(group.ops, {});
  group.makings.clear();
  const Local local;
  real::ncclGroupStart();
  for (Op& op : ops) {
    if (has_stream(op.what)) issue(op);
  }
  return real::ncclGroupSimulateEnd(info);
}

int ncclAllGather(void* s, void* r, std::size_t n, int t, void* c, void* stream) {
  return collective(What::AllGather, s, r, n, t, 0, 0, c, stream);
}
int ncclAllGatherConfig(void* s, void* r, std::size_t n, int t, void* c, void* stream, void* config) {
  return collective(What::AllGather, s, r, n, t, 0, 0, c, stream, true, config);
}
int ncclAllReduce(void* s, void* r, std::size_t n, int t, int op, void* c, void* stream) {
  return collective(What::AllReduce, s, r, n, t, op, 0, c, stream);
}
int ncclAllReduceConfig(void* s, void* r, std::size_t n, int t, int op, void* c, void* stream, void* config) {
  return collective(What::AllReduce, s, r, n, t, op, 0, c, stream, true, config);
}
int ncclAlltoAll(void* s, void* r, std::size_t n, int t, void* c, void* stream) {
  return collective(What::AlltoAll, s, r, n, t, 0, 0, c, stream);
}
int ncclAlltoAllConfig(void* s, void* r, std::size_t n, int t, void* c, void* stream, void* config) {
  return collective(What::AlltoAll, s, r, n, t, 0, 0, c, stream, true, config);
}
int ncclBcast(void* b, std::size_t n, int t, int root, void* c, void* stream) {
  return collective(What::Bcast, b, b, n, t, 0, root, c, stream);
}
int ncclBroadcast(void* s, void* r, std::size_t n, int t, int root, void* c, void* stream) {
  return collective(What::Broadcast, s, r, n, t, 0, root, c, stream);
}
int ncclBroadcastConfig(void* s, void* r, std::size_t n, int t, int root, void* c, void* stream, void* config) {
  return collective(What::Broadcast, s, r, n, t, 0, root, c, stream, true, config);
}
int ncclGather(void* s, void* r, std::size_t n, int t, int root, void* c, void* stream) {
  return collective(What::Gather, s, r, n, t, 0, root, c, stream);
}
int ncclGatherConfig(void* s, void* r, std::size_t n, int t, int root, void* c, void* stream, void* config) {
  return collective(What::Gather, s, r, n, t, 0, root, c, stream, true, config);
}
int ncclReduce(void* s, void* r, std::size_t n, int t, int op, int root, void* c, void* stream) {
  return collective(What::Reduce, s, r, n, t, op, root, c, stream);
}
int ncclReduceConfig(void* s, void* r, std::size_t n, int t, int op, int root, void* c, void* stream, void* config) {
  return collective(What::Reduce, s, r, n, t, op, root, c, stream, true, config);
}
int ncclReduceScatter(void* s, void* r, std::size_t n, int t, int op, void* c, void* stream) {
  return collective(What::ReduceScatter, s, r, n, t, op, 0, c, stream);
}
int ncclReduceScatterConfig(void* s, void* r, std::size_t n, int t, int op, void* c, void* stream, void* config) {
  return collective(What::ReduceScatter, s, r, n, t, op, 0, c, stream, true, config);
}
int ncclScatter(void* s, void* r, std::size_t n, int t, int root, void* c, void* stream) {
  return collective(What::Scatter, s, r, n, t, 0, root, c, stream);
}
int ncclScatterConfig(void* s, void* r, std::size_t n, int t, int root, void* c, void* stream, void* config) {
  return collective(What::Scatter, s, r, n, t, 0, root, c, stream, true, config);
}
int ncclSend(void* s, std::size_t n, int t, int peer, void* c, void* stream) {
  return collective(What::Send, s, nullptr, n, t, 0, peer, c, stream);
}
int ncclRecv(void* r, std::size_t n, int t, int peer, void* c, void* stream) {
  return collective(What::Recv, nullptr, r, n, t, 0, peer, c, stream);
}

int ncclCommWindowRegister(void* handle, void* buffer, std::size_t size, void* out, int flags) {
  Comm* comm = of(handle);
  if (comm == nullptr || out == nullptr) return real::ncclCommWindowRegister(real_of(handle), buffer, size, out, flags);
  const bool alone = group.depth == 0;
  const int result = carry_out(
      Op{.what = What::WindowRegister, .comm = comm, .receive = buffer, .count = size, .flags = flags, .out = out});
  if (alone) registered::settle_windows({comm});
  return result;
}

int ncclRedOpDestroy(int reduction, void* handle) {
  Comm* comm = of(handle);
  if (comm == nullptr) return real::ncclRedOpDestroy(reduction, handle);
  return carry_out(Op{.what = What::RedOpDestroy, .comm = comm, .reduction = reduction});
}

// ---- the end of a communicator

}  // namespace hook

namespace {

int ending(What what, void* handle) {
  Comm* comm = of(handle);
  if (group.depth > 0) {
    group.ops.push_back(Op{.what = what, .comm = comm});
    return kSuccess;
  }
  Call call;
  call.destroys = true;
  {
    Gate::Lock lock(gate().mutex);
    gate().enter(lock, call);
    destroy::begin(lock, *comm);
  }
  Op op{.what = what, .comm = comm};
  const int result = issue(op);
  destroy::ended(*comm, what != What::Finalize);
  gate().leave(call);
  return result;
}

}  // namespace

namespace hook {

int ncclCommFinalize(void* handle) {
  return of(handle) == nullptr ? real::ncclCommFinalize(handle) : ending(What::Finalize, handle);
}
int ncclCommDestroy(void* handle) {
  return of(handle) == nullptr ? real::ncclCommDestroy(handle) : ending(What::Destroy, handle);
}
int ncclCommAbort(void* handle) {
  return of(handle) == nullptr ? real::ncclCommAbort(handle) : ending(What::Abort, handle);
}

}  // namespace hook
}  // namespace moorage::nccl
