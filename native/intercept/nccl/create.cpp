#include "create.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "blocking.h"
#include "control.h"
#include "cuda.h"
#include "hooks.h"
#include "real.h"
#include "record.h"

namespace moorage::nccl {
namespace create {
namespace {

std::map<std::string, UniqueId, std::less<>>& renewed() {
  static auto* const all = new std::map<std::string, UniqueId, std::less<>>;
  return *all;
}

std::vector<std::vector<Making>>& taken() {
  static auto* const all = new std::vector<std::vector<Making>>;
  return *all;
}

// The ids to make it with: a fresh one where a cut has taken the creation back.
std::vector<UniqueId> ids_of(const Making& one, bool& fresh) {
  const Gate::Lock lock(gate().mutex);
  const auto found = renewed().find(one.comm->name());
  fresh = found != renewed().end();
  return fresh ? std::vector<UniqueId>{found->second} : one.ids;
}

int issue(const Making& one) {
  Comm& comm = *one.comm;
  std::vector<char> scratch;
  bool fresh = false;
  void* config = one.inherits ? nullptr : comm.config.unblocked(scratch);
  switch (one.how) {
    case Making::How::Init: return init(comm, ids_of(one, fresh));
    case Making::How::Grow: {
      auto ids = ids_of(one, fresh);
      // Everybody knows size and place, and the id of a growing one belongs to a parent that was destroyed.
      if (fresh) return init(comm, ids);
      return real::ncclCommGrow(one.parent == nullptr ? nullptr : one.parent->real, comm.size,
                                ids.empty() ? nullptr : ids.data(), one.parent == nullptr ? comm.rank : -1, &comm.real,
                                config);
    }
    case Making::How::Split: return real::ncclCommSplit(one.parent->real, one.color, one.key, &comm.real, config);
    case Making::How::Shrink: {
      std::vector<int> excluded = one.excluded;
      return real::ncclCommShrink(one.parent->real, excluded.data(), static_cast<int>(excluded.size()), &comm.real,
                                  config, one.flags);
    }
  }
  return kInternalError;
}

int start(const std::vector<Making>& makings, bool grouped) {
  void* const before = cuda::current_context();
  int result = kSuccess;
  for (const Making& one : makings) {
    if (one.parent != nullptr) blocking::off(*one.parent);
  }
  if (grouped) real::ncclGroupStart();
  for (const Making& one : makings) {
    if (one.comm->context != before) cuda::set_context(one.comm->context);
    const int bad = issue(one);
    if (bad != kSuccess && (result == kSuccess || result == kInProgress)) result = bad;
    if (bad != kSuccess && bad != kInProgress) break;
  }
  if (grouped) {
    const int bad = real::ncclGroupEnd();
    if (result == kSuccess || (result == kInProgress && bad != kSuccess)) result = bad;
  }
  if (cuda::current_context() != before) cuda::set_context(before);
  return result;
}

// Is NCCL done with all of them, and how did it go? Under the lock.
bool over(const std::vector<Making>& makings, int& result) {
  result = kSuccess;
  for (const Making& one : makings) {
    for (void* real : {one.comm->real, one.parent == nullptr ? nullptr : one.parent->real}) {
      if (real == nullptr) continue;
      int state = kSuccess;
      const int bad = real::ncclCommGetAsyncError(real, &state);
      if (bad != kSuccess) state = bad;
      if (state == kInProgress) return false;
      if (state != kSuccess) result = state;
    }
  }
  return true;
}

void completed(Making& one) {
  Comm& comm = *one.comm;
  comm.making = false;
  if (one.parent != nullptr) blocking::on(*one.parent);
  if (one.how == Making::How::Split) {
    gate().gone(*one.member);
    if (comm.real == nullptr) return;
    real::ncclCommCount(comm.real, &comm.size);
    real::ncclCommUserRank(comm.real, &comm.rank);
    std::string name = one.member->communicator->name + "." + std::to_string(one.color);
    comm.member = fresh_member(&comm, name, comm.rank, comm.size);
    comm.member->state = State::Ready;
    comm.member->communicator->user = thread_number();
    gate().add(comm.member);
  }
  real::ncclCommCuDevice(comm.real, &comm.device);
  // Whoever has said nothing of a device has the one that NCCL took.
  if (comm.context == nullptr) comm.context = cuda::primary_context(comm.device);
  blocking::on(comm);
}

void failed(Making& one) {
  if (one.parent != nullptr) blocking::on(*one.parent);
  gate().gone(*one.member);
  one.comm->dead = true;
  one.comm->making = false;
}

}  // namespace

int init(Comm& comm, const std::vector<UniqueId>& ids) {
  std::vector<char> scratch;
  void* config = comm.config.unblocked(scratch);
  if (ids.size() == 1) {
    const int result = real::ncclCommInitRankConfig(&comm.real, comm.size, ids[0], comm.rank, config);
    // Before 2.14: it blocks, and such a creation cannot be taken back.
    if (result != kAbsent || comm.real != nullptr) return result;
    return real::ncclCommInitRank(&comm.real, comm.size, ids[0], comm.rank);
  }
  auto all = ids;
  return real::ncclCommInitRankScalable(&comm.real, comm.size, comm.rank, static_cast<int>(all.size()), all.data(),
                                        config);
}

void renew(const std::string& name, const UniqueId& id) { renewed()[name] = id; }

Comm* fresh_comm(int size, int rank, const void* config) {
  auto* comm = new Comm;
  comm->size = size;
  comm->rank = rank;
  comm->config = Config::communicator(config);
  comm->blocking = comm->config.blocking();
  comm->context = cuda::current_context();
  comm->making = true;
  const Gate::Lock lock(gate().mutex);
  comms().push_back(comm);
  return comm;
}

std::string name_of(const std::vector<UniqueId>& ids) {
  std::uint64_t hash = kHashOfNothing;
  for (const UniqueId& id : ids) hash = hashed({id.internal, sizeof id.internal}, hash);
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "id-%016llx", static_cast<unsigned long long>(hash));
  return text.data();
}

std::uint64_t hashed(std::string_view text, std::uint64_t hash) {
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  return hash;
}

Member* fresh_member(Comm* owner, std::string_view name, int member, int size) {
  auto* made = new Member;
  made->owner = owner;
  made->communicator = gate().communicator(name);
  made->member = member;
  made->size = size;
  return made;
}

int make(std::vector<Making>& makings, bool grouped) {
  control::await_welcome();
  Gate& door = gate();
  std::vector<Member*> creates;
  std::vector<Comm*> made;
  for (const Making& one : makings) {
    creates.push_back(one.member);
    made.push_back(one.comm);
  }
  const bool waits = std::all_of(made.begin(), made.end(), [](const Comm* comm) { return comm->blocking; });
  for (;;) {
    Call call;
    call.creates = creates;
    Gate::Lock lock(door.mutex);
    door.enter(lock, call);
    // Taken back before it was begun: there is nothing to abort.
    while (door.torn && call.where == Call::Where::Inside) door.wait(lock);
    if (call.where == Call::Where::Inside) {
      for (const Making& one : makings) {
        if (one.how == Making::How::Grow && one.parent != nullptr && !one.ids.empty()) {
          one.parent->refused.erase("ncclCommGetUniqueId");
        }
      }
      ++door.locals;
      lock.unlock();
      int result = start(makings, grouped);
      lock.lock();
      door.leave_local(lock);
      if (result != kSuccess && result != kInProgress) {
        for (Making& one : makings) failed(one);
        door.leave(lock, call);
        return result;
      }
      if (!waits) {
        // In one step with the end of the start: from now on it may be taken back.
        leave_later(lock, call, {}, made, makings);
        return result;
      }
      Pause pause;
      while (call.where == Call::Where::Inside) {
        if (door.stands(call) || door.torn) {
          door.wait(lock);
          continue;
        }
        if (over(makings, result)) {
          for (Making& one : makings) result == kSuccess ? completed(one) : failed(one);
          door.leave(lock, call);
          return result;
        }
        lock.unlock();
        pause();
        lock.lock();
      }
    }
    while (door.torn || door.phase != Phase::Open) door.wait(lock);
  }
}

void look(Gate::Lock& lock, Pending& pending) {
  if (gate().stands(pending.call) || gate().torn) return;
  int result = kSuccess;
  if (!over(pending.makings, result)) return;
  for (Making& one : pending.makings) result == kSuccess ? completed(one) : failed(one);
  gate().leave(lock, pending.call);
  for (Comm* comm : pending.comms) std::erase(comm->pending, &pending);
  delete &pending;
}

std::vector<void*> take_back(Gate::Lock& lock, Call& call) {
  std::vector<void*> aborted;
  Pending* unwatched = nullptr;
  for (const Member* member : call.creates) {
    Comm& comm = *member->owner;
    for (Pending* one : comm.pending) {
      if (&one->call == &call) unwatched = one;
    }
    if (comm.real != nullptr) aborted.push_back(std::exchange(comm.real, nullptr));
  }
  gate().take_back(lock, call);
  if (unwatched != nullptr) {
    taken().push_back(unwatched->makings);
    for (Comm* comm : unwatched->comms) std::erase(comm->pending, unwatched);
    delete unwatched;
  }
  return aborted;
}

void begin_again() {
  std::vector<std::vector<Making>> todo;
  {
    const Gate::Lock lock(gate().mutex);
    todo.swap(taken());
  }
  for (auto& makings : todo) make(makings, makings.size() > 1);
}

int one(Making making, void** out) {
  if (out == nullptr) return kInvalidArgument;
  *out = making.how == Making::How::Split && making.color < 0 ? nullptr : making.comm;
  if (record::depth() > 0) {
    record::add(std::move(making));
    return kSuccess;
  }
  std::vector<Making> alone{std::move(making)};
  const int result = make(alone, false);
  if (result != kSuccess && result != kInProgress) *out = nullptr;
  return result;
}

Making child_of(Comm& parent, Making::How how, int size, int rank, const void* config) {
  Making one;
  one.how = how;
  one.parent = &parent;
  one.comm = fresh_comm(size, rank, config);
  one.inherits = config == nullptr;
  if (one.inherits) one.comm->config = parent.config;
  one.comm->blocking = one.inherits ? parent.blocking : one.comm->config.blocking();
  one.comm->context = parent.context;
  return one;
}

}  // namespace create

// ---- the job's calls

namespace {

Making making_of(const std::vector<UniqueId>& ids, int size, int rank, const void* config) {
  control::start();
  Making one;
  one.comm = create::fresh_comm(size, rank, config);
  one.ids = ids;
  const Gate::Lock lock(gate().mutex);
  one.member = one.comm->member = create::fresh_member(one.comm, create::name_of(ids), rank, size);
  return one;
}

}  // namespace

namespace hook {

int ncclGetUniqueId(void* id) {
  control::start();
  return real::ncclGetUniqueId(id);
}

int ncclCommInitRankConfig(void* comm, int ranks, UniqueId id, int rank, void* config) {
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
    return real::ncclCommInitRankConfig(comm, ranks, id, rank, config);
  }
  return create::one(making_of({id}, ranks, rank, config), static_cast<void**>(comm));
}

int ncclCommInitRank(void* comm, int ranks, UniqueId id, int rank) {
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks) return real::ncclCommInitRank(comm, ranks, id, rank);
  return create::one(making_of({id}, ranks, rank, nullptr), static_cast<void**>(comm));
}

int ncclCommInitRankScalable(void* comm, int ranks, int rank, int count, void* ids, void* config) {
  if (comm == nullptr || ids == nullptr || count < 1 || ranks < 1 || rank < 0 || rank >= ranks) {
    return real::ncclCommInitRankScalable(comm, ranks, rank, count, ids, config);
  }
  const auto* first = static_cast<const UniqueId*>(ids);
  return create::one(making_of({first, first + count}, ranks, rank, config), static_cast<void**>(comm));
}

int ncclCommInitAll(void* into, int count, void* devices) {
  if (into == nullptr || count < 1) return real::ncclCommInitAll(into, count, devices);
  auto** out = static_cast<void**>(into);
  UniqueId id{};
  if (const int bad = ncclGetUniqueId(&id); bad != kSuccess) return bad;
  std::vector<Making> all;
  for (int rank = 0; rank < count; ++rank) {
    all.push_back(making_of({id}, count, rank, nullptr));
    void* context = cuda::primary_context(devices == nullptr ? rank : static_cast<const int*>(devices)[rank]);
    if (context != nullptr) all.back().comm->context = context;
    out[rank] = all.back().comm;
  }
  const int result = create::make(all, true);
  if (result != kSuccess) std::fill(out, out + count, nullptr);
  return result;
}

int ncclCommSplit(void* handle, int color, int key, void* out, void* config) {
  Comm* parent = of(handle);
  if (parent == nullptr || parent->member == nullptr || out == nullptr || color < kNoColor) {
    return real::ncclCommSplit(real_of(handle), color, key, out, config);
  }
  Making one = create::child_of(*parent, Making::How::Split, 0, 0, config);
  one.color = color;
  one.key = key;
  {
    const Gate::Lock lock(gate().mutex);
    const std::string name = parent->member->communicator->name + "/s" + std::to_string(++parent->splits);
    one.member = create::fresh_member(one.comm, name, parent->rank, parent->size);
  }
  return create::one(std::move(one), static_cast<void**>(out));
}

int ncclCommShrink(void* handle, void* excluded, int count, void* out, void* config, int flags) {
  Comm* parent = of(handle);
  if (parent == nullptr || parent->member == nullptr || out == nullptr || excluded == nullptr || count < 1) {
    return real::ncclCommShrink(real_of(handle), excluded, count, out, config, flags);
  }
  std::vector<int> gone(static_cast<const int*>(excluded), static_cast<const int*>(excluded) + count);
  std::sort(gone.begin(), gone.end());
  const auto before = std::lower_bound(gone.begin(), gone.end(), parent->rank) - gone.begin();
  Making one = create::child_of(*parent, Making::How::Shrink, parent->size - count, parent->rank - static_cast<int>(before),
                        config);
  one.excluded = gone;
  one.flags = flags;
  {
    const Gate::Lock lock(gate().mutex);
    std::string name = parent->member->communicator->name + "/x";
    for (const int rank : gone) name += std::to_string(rank) + ",";
    const auto earlier = std::count(parent->shrinks.begin(), parent->shrinks.end(), name);
    parent->shrinks.push_back(name);
    name.back() = '.';
    name += std::to_string(earlier + 1);
    one.member = one.comm->member = create::fresh_member(one.comm, name, one.comm->rank, one.comm->size);
  }
  return create::one(std::move(one), static_cast<void**>(out));
}

}  // namespace hook
}  // namespace moorage::nccl
