// Counts calls, holds them while it is closed, lets them go on by ticket: nccl_quiesce/gate.py, with one lock.
//
// A call is seen, counted and let in, or seen and held, in one step under the lock, so no thread is ever between the
// two, and `entering` of a report is always 0.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "msgpack.h"

namespace moorage::nccl {

// One for each name that this process knows.
struct Communicator {
  std::string name;
  std::uint32_t user = 0;  // the thread that used it last; 0: none yet
};

struct Comm;

enum class State : std::uint8_t { Creating, Ready, Gone };
enum class Kind : std::uint8_t { Collective, Send, Receive };
enum class Phase : std::uint8_t { Open, Cut, Drain };

// A member of a communicator that lives in this process. Its counts stay when it is gone.
struct Member {
  Communicator* communicator = nullptr;
  int member = 0;
  int size = 0;
  State state = State::Creating;
  Comm* owner = nullptr;  // whose it is, or will be
  std::uint64_t collectives = 0;
  std::vector<std::uint64_t> sends;
  std::vector<std::uint64_t> receives;

  std::uint64_t& count(Kind kind, int peer);
  std::uint64_t counted(Kind kind, int peer) const;
};

struct Lane {
  Member* member;
  Kind kind;
  int peer;  // -1 for collectives
  std::uint64_t number = 1;
};

// One call that the gate treats as a whole. It belongs to the calling thread; lists of them are linked through it.
struct Call {
  enum class Where : std::uint8_t { Outside, Held, Inside, TakenBack };

  std::span<const Lane> lanes;
  std::span<Member* const> creates;
  bool destroys = false;

  std::uint64_t ticket = 0;
  std::uint32_t thread = 0;
  Where where = Where::Outside;
  bool thawed = false;
  Call* previous = nullptr;
  Call* next = nullptr;
};

struct Need {
  Member* member;  // null: not known here
  Communicator* communicator;
  Kind kind;
  int peer;
  std::uint64_t need;
};

struct Order {
  std::uint64_t attempt = 0;
  std::uint64_t round = 0;
  Phase phase = Phase::Open;
  std::vector<std::uint64_t> admit;
  struct Wanted {
    std::string communicator;
    int member;
    Kind kind;
    int peer;
    std::uint64_t need;
  };
  std::vector<Wanted> needs;
  bool push = false;
};

class Gate {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // Guards all of this and all that hangs on it: communicators, their handles.
  std::mutex mutex;

  // ---- what the job's threads do

  // Show a call; returns when it was let in. Its lanes and creations must live until it leaves.
  void enter(Call& call);
  void enter(Lock& lock, Call& call);
  void leave(Call& call);
  void leave(Lock& lock, Call& call);
  // The call goes on without its thread, in memory that stays.
  void replace(Lock& lock, Call& old, Call& stays);
  // Creations must not come through: their results are not looked at.
  bool stands(const Call& call) const { return phase == Phase::Drain && !call.thawed; }
  // Wait until something was told: an order, a teardown, a rebuild.
  void wait(Lock& lock) { told_.wait(lock); }
  void wake() { told_.notify_all(); }
  void gone(Member& member);
  void take_back(Lock& lock, Call& call);

  // Calls that issue nothing, but need communicators to be there.
  void enter_local(Lock& lock);
  void leave_local(Lock& lock);

  Communicator* communicator(std::string_view name);
  void add(Member* member) { members.push_back(member); ++moves; }

  // ---- what the worker does

  // False: the order is out of date.
  bool obey(Lock& lock, const Order& order);
  // Everything from `attempt` on of a Report.
  void report(msgpack::Writer& out, const std::vector<std::string>& undrained) const;
  // The worker is gone for good: the gate opens, unless its cut was accepted. Then partners may have lost theirs.
  void give_up(Lock& lock);
  // False: the gate is not closed for this cut.
  bool keep(Lock& lock, std::uint64_t accepted);

  Phase phase = Phase::Open;
  bool torn = false;  // the communicators are gone
  std::uint64_t attempt = 0;
  std::uint64_t round = 0;
  std::uint64_t kept = 0;  // the newest attempt that was accepted
  std::uint64_t moves = 0;
  unsigned locals = 0;
  Call* inside_first() const { return inside_.first; }
  std::vector<Member*> members;

 private:
  struct List {
    Call* first = nullptr;
    Call* last = nullptr;
    void append(Call& call);
    void remove(Call& call);
    void replace(Call& old, Call& stays);
  };

  bool goes_on(const Call& call) const;
  void begin(Call& call);
  void admit(Call& call);

  List held_;
  List inside_;
  std::map<std::string, Communicator*, std::less<>> names_;
  std::vector<Need> needs_;
  bool push_ = false;
  std::uint64_t tickets_ = 0;
  std::condition_variable told_;
};

Gate& gate();
std::uint32_t thread_number();

// Around a call that issues nothing, but needs communicators to be there.
class Local {
 public:
  Local();
  ~Local();
  Local(const Local&) = delete;
  Local& operator=(const Local&) = delete;
};

}  // namespace moorage::nccl
