#include "gate.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <tuple>

namespace moorage::nccl {

Gate& gate() {
  alignas(Gate) static unsigned char storage[sizeof(Gate)];
  static Gate* const one = new (storage) Gate;  // never destroyed: threads may call while the process ends
  return *one;
}

std::uint32_t thread_number() {
  static thread_local std::uint32_t number = 0;
  if (number == 0) number = static_cast<std::uint32_t>(syscall(SYS_gettid));
  return number;
}

std::uint64_t& Member::count(Kind kind, int peer) {
  if (kind == Kind::Collective) return collectives;
  auto& counts = kind == Kind::Send ? sends : receives;
  if (counts.empty()) counts.resize(static_cast<std::size_t>(size));
  return counts[static_cast<std::size_t>(peer)];
}

std::uint64_t Member::counted(Kind kind, int peer) const {
  if (kind == Kind::Collective) return collectives;
  const auto& counts = kind == Kind::Send ? sends : receives;
  return peer >= 0 && static_cast<std::size_t>(peer) < counts.size() ? counts[static_cast<std::size_t>(peer)] : 0;
}

void Gate::List::append(Call& call) {
  call.previous = last;
  call.next = nullptr;
  (last != nullptr ? last->next : first) = &call;
  last = &call;
}

void Gate::List::remove(Call& call) {
  (call.previous != nullptr ? call.previous->next : first) = call.next;
  (call.next != nullptr ? call.next->previous : last) = call.previous;
  call.previous = call.next = nullptr;
}

void Gate::List::replace(Call& old, Call& stays) {
  stays.previous = old.previous;
  stays.next = old.next;
  (stays.previous != nullptr ? stays.previous->next : first) = &stays;
  (stays.next != nullptr ? stays.next->previous : last) = &stays;
  old.previous = old.next = nullptr;
}

// ---- what the job's threads do

void Gate::enter(Call& call) {
  Lock lock(mutex);
  enter(lock, call);
}

void Gate::enter(Lock& lock, Call& call) {
  call.ticket = ++tickets_;
  call.thread = thread_number();
  ++moves;
  // What destroys passes every gate, but not one behind which there is nothing to destroy.
  while (call.destroys && torn) told_.wait(lock);
  if ((phase == Phase::Open && !torn) || call.destroys || (!torn && goes_on(call))) [[likely]] {
    begin(call);
    return;
  }
  call.where = Call::Where::Held;
  held_.append(call);
  while (call.where == Call::Where::Held) told_.wait(lock);
}

void Gate::leave(Call& call) {
  Lock lock(mutex);
  leave(lock, call);
}

void Gate::leave(Lock&, Call& call) {
  ++moves;
  inside_.remove(call);
  call.where = Call::Where::Outside;
  for (Member* member : call.creates) {
    if (member->state == State::Creating) member->state = State::Ready;
    if (member->communicator->user == 0) member->communicator->user = call.thread;
  }
}

void Gate::replace(Lock&, Call& old, Call& stays) {
  stays.ticket = old.ticket;
  stays.thread = old.thread;
  stays.where = old.where;
  stays.thawed = old.thawed;
  stays.destroys = old.destroys;
  inside_.replace(old, stays);
  old.where = Call::Where::Outside;
}

void Gate::gone(Member& member) {
  ++moves;
  member.state = State::Gone;
}

// A creation that no member finished is undone, as if it had never entered.
void Gate::take_back(Lock&, Call& call) {
  ++moves;
  inside_.remove(call);
  call.where = Call::Where::TakenBack;
  for (Member* member : call.creates) std::erase(members, member);
  told_.notify_all();
}

void Gate::enter_local(Lock& lock) {
  while (torn) told_.wait(lock);
  ++locals;
}

void Gate::leave_local(Lock&) {
  if (--locals == 0 && torn) told_.notify_all();
}

Communicator* Gate::communicator(std::string_view name) {
  const auto found = names_.find(name);
  if (found != names_.end()) return found->second;
  auto* made = new Communicator{std::string(name)};
  names_.emplace(made->name, made);
  return made;
}

Local::Local() {
  Gate::Lock lock(gate().mutex);
  gate().enter_local(lock);
}

Local::~Local() {
  Gate::Lock lock(gate().mutex);
  gate().leave_local(lock);
}

// ---- what the worker does

bool Gate::obey(Lock&, const Order& order) {
  const auto asked = std::tie(order.attempt, order.round);
  const auto now = std::tie(attempt, round);
  if (asked < now) return false;
  if (asked == now) return true;
  if (order.attempt > attempt) {
    for (Call* call = inside_.first; call != nullptr; call = call->next) call->thawed = false;
  }
  attempt = order.attempt;
  round = order.round;
  phase = order.phase;
  push_ = order.push;
  needs_.clear();
  for (const Order::Wanted& wanted : order.needs) {
    const auto name = names_.find(wanted.communicator);
    if (name == names_.end()) continue;
    const auto member = std::find_if(members.begin(), members.end(), [&](const Member* one) {
      return one->communicator == name->second && one->member == wanted.member;
    });
    needs_.push_back({member == members.end() ? nullptr : *member, name->second, wanted.kind, wanted.peer, wanted.need});
  }
  if (phase == Phase::Open) {
    while (held_.first != nullptr) admit(*held_.first);
  } else {
    for (const std::uint64_t ticket : order.admit) {
      for (Call* call = held_.first; call != nullptr; call = call->next) {
        if (call->ticket != ticket) continue;
        admit(*call);
        break;
      }
      for (Call* call = inside_.first; call != nullptr; call = call->next) {
        if (call->ticket == ticket) call->thawed = true;
      }
    }
    for (Call* call = needs_.empty() ? nullptr : held_.first; call != nullptr;) {
      Call* const next = call->next;
      if (goes_on(*call)) admit(*call);
      call = next;
    }
  }
  told_.notify_all();
  return true;
}

bool Gate::keep(Lock&, std::uint64_t accepted) {
  if (!torn && (phase != Phase::Drain || attempt != accepted)) return false;
  kept = accepted;
  return true;
}

void Gate::give_up(Lock&) {
  if (phase == Phase::Open || torn || kept == attempt) return;
  phase = Phase::Open;
  needs_.clear();
  while (held_.first != nullptr) admit(*held_.first);
  told_.notify_all();
}

// Whether a call goes on at a closed gate: rules 1 and 2 of the cut, as far as needs are known here.
bool Gate::goes_on(const Call& call) const {
  for (const Need& need : needs_) {
    if (need.member != nullptr && need.member->counted(need.kind, need.peer) >= need.need) continue;
    // Owed: a call on a lane on which the process is behind; of a group any lane counts.
    for (const Lane& lane : call.lanes) {
      if (lane.member == need.member && lane.kind == need.kind && lane.peer == need.peer) return true;
    }
    // Pushed: of the thread that used the communicator last.
    if (push_ && need.communicator->user == call.thread) return true;
  }
  return false;
}

void Gate::begin(Call& call) {
  call.where = Call::Where::Inside;
  inside_.append(call);
  for (const Lane& lane : call.lanes) {
    lane.member->count(lane.kind, lane.peer) += lane.number;
    lane.member->communicator->user = call.thread;
  }
  for (Member* member : call.creates) {
    member->state = State::Creating;
    members.push_back(member);
  }
}

void Gate::admit(Call& call) {
  held_.remove(call);
  ++moves;
  begin(call);
}

namespace {

// Names in the order in which a report first speaks of them.
class Names {
 public:
  std::uint64_t index(const Communicator* communicator) {
    const auto [place, fresh] = numbers_.emplace(communicator, list.size());
    if (fresh) list.push_back(communicator);
    return place->second;
  }
  std::vector<const Communicator*> list;

 private:
  std::map<const Communicator*, std::uint64_t> numbers_;
};

using Key = std::tuple<const Member*, Kind, int>;

void write_lane(msgpack::Writer& out, Names& names, const Member& member, Kind kind, int peer, std::uint64_t count) {
  out.array(5).number(names.index(member.communicator)).integer(member.member);
  out.number(static_cast<std::uint64_t>(kind)).integer(kind == Kind::Collective ? -1 : peer).number(count);
}

void write_call(msgpack::Writer& out, Names& names, const Call& call) {
  std::map<Key, std::uint64_t> sums;
  for (const Lane& lane : call.lanes) sums[{lane.member, lane.kind, lane.peer}] += lane.number;
  out.array(5).number(call.ticket).number(call.thread).number(call.destroys ? 1 : 0).array(sums.size());
  for (const auto& [key, count] : sums) {
    write_lane(out, names, *std::get<0>(key), std::get<1>(key), std::get<2>(key), count);
  }
  out.array(call.creates.size());
  for (const Member* member : call.creates) {
    out.array(3).number(names.index(member->communicator)).integer(member->member).integer(member->size);
  }
}

void write_calls(msgpack::Writer& out, Names& names, const Call* first) {
  std::vector<const Call*> calls;
  for (; first != nullptr; first = first->next) calls.push_back(first);
  std::sort(calls.begin(), calls.end(), [](const Call* a, const Call* b) { return a->ticket < b->ticket; });
  out.array(calls.size());
  for (const Call* call : calls) write_call(out, names, *call);
}

void write_counts(msgpack::Writer& out, Names& names, const std::vector<Member*>& members) {
  std::size_t lanes = 0;
  const auto each = [&](auto&& tell) {
    for (const Member* member : members) {
      if (member->collectives != 0) tell(*member, Kind::Collective, -1, member->collectives);
      for (int peer = 0; peer < member->size; ++peer) {
        if (const auto count = member->counted(Kind::Send, peer)) tell(*member, Kind::Send, peer, count);
        if (const auto count = member->counted(Kind::Receive, peer)) tell(*member, Kind::Receive, peer, count);
      }
    }
  };
  each([&](const Member&, Kind, int, std::uint64_t) { ++lanes; });
  out.array(lanes);
  each([&](const Member& member, Kind kind, int peer, std::uint64_t count) {
    write_lane(out, names, member, kind, peer, count);
  });
}

}  // namespace

void Gate::report(msgpack::Writer& out, const std::vector<std::string>& undrained) const {
  // The names come first in the message, but are known last: the rest is written twice, the first time for them.
  Names names;
  for (const bool real : {false, true}) {
    msgpack::Writer scratch;
    msgpack::Writer& to = real ? out : scratch;
    to.number(attempt).number(round).array(names.list.size());
    for (const Communicator* communicator : names.list) to.text(communicator->name);
    write_counts(to, names, members);
    write_calls(to, names, held_.first);
    write_calls(to, names, inside_.first);
    to.number(0).array(members.size());
    for (const Member* member : members) {
      to.array(4).number(names.index(member->communicator)).integer(member->member).integer(member->size);
      to.number(static_cast<std::uint64_t>(member->state));
    }
    std::size_t users = 0;
    for (const auto& [name, communicator] : names_) users += communicator->user != 0 ? 1 : 0;
    to.array(users);
    for (const auto& [name, communicator] : names_) {
      if (communicator->user != 0) to.array(2).number(names.index(communicator)).number(communicator->user);
    }
    to.number(moves).array(undrained.size());
    for (const std::string& stream : undrained) to.text(stream);
  }
}

}  // namespace moorage::nccl
