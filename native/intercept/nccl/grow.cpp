// Communicators that grow. All members must know one name for the new one: those that the parent has know how often it
// grew, but only one of them has the id; those that join know the id and nothing else. So the id carries the name.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "control.h"
#include "create.h"
#include "hooks.h"
#include "real.h"

namespace moorage::nccl {
namespace {

// In the last bytes of an id, which NCCL leaves zero. NCCL never sees it.
struct Label {
  std::array<char, 8> mark;
  std::uint64_t parent;  // the hash of its name
  std::uint64_t number;
  std::uint64_t check;
};
constexpr std::array<char, 8> kMark{'m', 'o', 'o', 'r', 'g', 'r', 'o', 'w'};
constexpr std::size_t kPlace = sizeof(UniqueId) - sizeof(Label);

std::uint64_t check_of(const Label& label) {
  return create::hashed({reinterpret_cast<const char*>(&label), offsetof(Label, check)});
}

bool put(UniqueId& id, std::uint64_t parent, std::uint64_t number) {
  char* const place = id.internal + kPlace;
  if (std::any_of(place, place + sizeof(Label), [](char byte) { return byte != 0; })) return false;
  Label label{kMark, parent, number, 0};
  label.check = check_of(label);
  std::memcpy(place, &label, sizeof label);
  return true;
}

// False: there is none.
bool take(UniqueId& id, Label& label) {
  std::memcpy(&label, id.internal + kPlace, sizeof label);
  if (label.mark != kMark || label.check != check_of(label)) return false;
  std::memset(id.internal + kPlace, 0, sizeof label);
  return true;
}

std::string named(std::uint64_t parent, std::uint64_t number) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "grow-%016llx.%llu", static_cast<unsigned long long>(parent),
                static_cast<unsigned long long>(number));
  return text.data();
}

// With an id that was drawn where nobody looked: not counted, and refused at prepare.
int unnamed(Comm* parent, int ranks, void* id, int rank, void** out, void* config) {
  Comm* comm = create::fresh_comm(ranks, rank, config);
  if (config == nullptr && parent != nullptr) comm->blocking = parent->blocking;
  refuse(comm, "ncclCommGrow");
  comm->making = false;
  const Local local;
  const int result = real::ncclCommGrow(parent == nullptr ? nullptr : parent->real, ranks, id, rank, &comm->real, config);
  *out = comm;
  if (result == kSuccess) {
    real::ncclCommUserRank(comm->real, &comm->rank);
    real::ncclCommCuDevice(comm->real, &comm->device);
  }
  return result;
}

}  // namespace

namespace create {

std::string grown_name(std::string_view parent, std::uint64_t times) { return named(hashed(parent), times); }

}  // namespace create

namespace hook {

int ncclCommGetUniqueId(void* handle, void* id) {
  Comm* comm = of(handle);
  const Local local;
  const int result = real::ncclCommGetUniqueId(real_of(handle), id);
  if (result != kSuccess || comm == nullptr || comm->member == nullptr || id == nullptr) return result;
  const Gate::Lock lock(gate().mutex);
  // What the id belongs to goes with the communicator, so none may be on its way at a cut.
  if (put(*static_cast<UniqueId*>(id), create::hashed(comm->name()), comm->grows + 1)) comm->refused.insert("ncclCommGetUniqueId");
  return result;
}

int ncclCommGrow(void* handle, int ranks, void* id, int rank, void* out, void* config) {
  control::start();
  Comm* parent = of(handle);
  const bool joins = handle == nullptr;
  const bool sound = out != nullptr && (joins ? id != nullptr && rank >= 0 && rank < ranks
                                              : parent != nullptr && rank == -1 && ranks > parent->size);
  if (!sound) return real::ncclCommGrow(real_of(handle), ranks, id, rank, out, config);
  auto** place = static_cast<void**>(out);
  UniqueId plain{};
  Label label{};
  const bool labelled = id != nullptr && take(plain = *static_cast<UniqueId*>(id), label);
  std::uint64_t hash = label.parent;
  std::uint64_t number = label.number;
  bool known = joins ? labelled : parent->member != nullptr;
  if (!joins && known) {
    const Gate::Lock lock(gate().mutex);
    hash = create::hashed(parent->name());
    number = ++parent->grows;
    known = id == nullptr || (labelled && label.parent == hash && label.number == number);
    if (!known) parent->refused.erase("ncclCommGetUniqueId");
  }
  if (!known) return unnamed(parent, ranks, id == nullptr ? nullptr : &plain, rank, place, config);
  Making one;
  if (joins) {
    one.how = Making::How::Grow;
    one.comm = create::fresh_comm(ranks, rank, config);
  } else {
    one = create::child_of(*parent, Making::How::Grow, ranks, parent->rank, config);
  }
  if (id != nullptr) one.ids.push_back(plain);
  {
    const Gate::Lock lock(gate().mutex);
    one.member = one.comm->member = create::fresh_member(one.comm, named(hash, number), one.comm->rank, ranks);
  }
  return create::one(std::move(one), place);
}

}  // namespace hook
}  // namespace moorage::nccl
