// How communicators come about: non-blocking underneath, so that a creation can stand still and be taken back.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm.h"

namespace moorage::nccl::create {

// Make these together (one, or all of a group). Returns when they are there; for non-blocking ones at once.
int make(std::vector<Making>& makings, bool grouped);

// Look whether what the job does not wait for is over, unless it stands still. Under the lock.
void look(Gate::Lock& lock, Pending& pending);

// Take a creation back, and answer which real communicators are to be aborted. Under the lock.
std::vector<void*> take_back(Gate::Lock& lock, Call& call);
// The gate is open: what was taken back and nobody waits for is begun again.
void begin_again();

// The unique ids that take the place of those the job knows, by name. Under the lock.
void renew(const std::string& name, const UniqueId& id);

Comm* fresh_comm(int size, int rank, const void* config);
std::string name_of(const std::vector<UniqueId>& ids);
inline constexpr std::uint64_t kHashOfNothing = 0xcbf29ce484222325ULL;
std::uint64_t hashed(std::string_view text, std::uint64_t hash = kHashOfNothing);
Member* fresh_member(Comm* owner, std::string_view name, int member, int size);

// Of what a communicator of this name became when it grew so often.
std::string grown_name(std::string_view parent, std::uint64_t times);

// A member's part in a creation, as the job asks for it: `out` is where it wants its handle. Alone or in a group.
int one(Making making, void** out);
// Of a child of `parent`, whose configuration it has unless it has one of its own.
Making child_of(Comm& parent, Making::How how, int size, int rank, const void* config);

// Call NCCL for one of them. What `real` points to is filled in at once or when the group ends.
int init(Comm& comm, const std::vector<UniqueId>& ids);

}  // namespace moorage::nccl::create
