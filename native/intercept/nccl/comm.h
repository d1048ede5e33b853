// Virtual communicators: what the job holds in its hands, and what is needed to make the real ones anew.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "api.h"
#include "gate.h"

namespace moorage::nccl {

// A copy of a structure with a size of its own, and of the texts it points to.
class Config {
 public:
  Config() = default;
  // ncclConfig_t, or null.
  static Config communicator(const void* given);
  // ncclCollConfig_t, or null.
  static Config collective(const void* given);

  bool blocking() const;
  // For a call: never blocking underneath. `scratch` holds it.
  void* unblocked(std::vector<char>& scratch) const;
  // The name by which NCCL knows the communicator: a pointer that no other one has. Null if it has none.
  const char* name() const;
  // Where it lies in a ncclConfig_t.
  static constexpr std::size_t kCommName = 48;
  // Null when none was given.
  void* get() { return bytes_.empty() ? nullptr : bytes_.data(); }

 private:
  void keep(std::size_t offset);
  void be_named();

  std::vector<char> bytes_;
  std::vector<std::shared_ptr<std::string>> texts_;
};

struct Registration {
  void* address;
  std::size_t size;
  void* real;
};

struct Window {
  void* address;
  std::size_t size;
  int flags;
  void* handle;  // the job's: what NCCL first said
  void* real;
};

struct Reduction {
  int handle;
  int real;
  alignas(8) char scalar[8];  // when it lies on the host
  void* address;
  int type;
  int residence;
};

// What is behind a stream that is no more: done when the event is.
struct Left {
  void* event;
  void* stream;
};

struct Comm;

// One member's part in making a communicator.
struct Making {
  enum class How : std::uint8_t { Init, Split, Shrink, Grow };

  How how = How::Init;
  Comm* comm = nullptr;
  Comm* parent = nullptr;    // null for a member that a growing communicator did not have
  Member* member = nullptr;  // of a split: what stands for it while it is made
  std::vector<UniqueId> ids;
  int color = 0;
  int key = 0;
  std::vector<int> excluded;
  int flags = 0;
  bool inherits = false;  // no configuration was given: the parent's
};

// What the job did not wait for: a call that NCCL still carries out.
struct Pending {
  Call call;
  std::vector<Lane> lanes;
  std::vector<Member*> creates;
  std::vector<Comm*> comms;
  std::vector<Making> makings;  // of a creation
};

struct Comm {
  static constexpr std::uint64_t kMagic = 0x6d6f6f726167654eULL;

  std::uint64_t magic = kMagic;
  // All below is guarded by the gate's lock; `real` may be used by a call that was let in without it.
  Member* member = nullptr;  // null: not counted, refused at prepare
  void* real = nullptr;
  int size = 0;
  int rank = 0;
  int device = -1;
  bool blocking = true;
  bool dead = false;    // finalized or destroyed by the job, or widowed
  bool making = false;  // its creation is not over
  bool ending = false;  // a thread of the job is about it
  bool leaving = false;  // finalized by a teardown that has not come to its end
  std::uint64_t died_in = 0;  // the attempt during which it was destroyed; 0: while the gate was open
  void* context = nullptr;
  Config config;
  unsigned splits = 0;
  unsigned grows = 0;
  std::vector<std::string> shrinks;
  std::vector<void*> streams;
  std::vector<Left> left;
  std::vector<std::unique_ptr<Registration>> registrations;
  std::vector<Window> windows;
  std::vector<Reduction> reductions;
  std::vector<Pending*> pending;
  std::set<std::string> refused;  // what was done with it that cannot be carried over

  std::string_view name() const { return member == nullptr ? std::string_view() : member->communicator->name; }
};

// The communicator behind a handle of the job; null when it is none of ours. It is never freed.
inline Comm* of(void* handle) {
  auto* comm = static_cast<Comm*>(handle);
  return comm != nullptr && comm->magic == Comm::kMagic ? comm : nullptr;
}

// All that were ever made, under the gate's lock.
std::vector<Comm*>& comms();

// The handle to give to NCCL: the real communicator, or what is none of ours.
inline void* real_of(void* handle) {
  Comm* comm = of(handle);
  return comm == nullptr ? handle : comm->real;
}

// The real reduction behind a number of the job's.
int reduction_of(const Comm* comm, int handle);
void* window_of(const Comm* comm, void* handle);

// Something that cannot be carried over was done.
void refuse(Comm* comm, const char* api);
void accept(Comm* comm, const char* api);  // it is over
struct Refused {
  std::string communicator;
  std::string api;
  std::string why;
};
std::vector<Refused> refusals();

// Poll until NCCL is no longer busy with it. The answer is its result.
int finish(const Comm& comm);
// The call is in NCCL's hands and the job goes on.
void leave_later(Gate::Lock& lock, Call& call, std::vector<Lane> lanes, const std::vector<Comm*>& involved,
                 std::vector<Making> makings = {});
// See whether something pending is over. Under the lock.
void look_at_pending(Gate::Lock& lock, Comm& comm);
// What to do with the result of a call that was let in: wait, or let the job go on.
int settle(Call& call, int result, const std::vector<Comm*>& involved);

// A pause between two looks that grows from 20 µs to 1 ms.
class Pause {
 public:
  void operator()();

 private:
  long microseconds_ = 20;
};

}  // namespace moorage::nccl
