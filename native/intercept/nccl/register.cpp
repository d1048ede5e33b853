#include "register.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hooks.h"
#include "real.h"

namespace moorage::nccl {
namespace {

constexpr int kOnHost = 1;
constexpr int kSymmetric = 1;
constexpr std::array<std::size_t, 12> kSizes{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

int next_reduction = 1 << 24;  // under the lock

// What NCCL has not told yet: where it writes its handle.
struct Awaited {
  Comm* comm;
  void** out;
  Window window;
};
std::vector<Awaited>& awaited() {
  static auto* const all = new std::vector<Awaited>;
  return *all;
}

}  // namespace

namespace registered {

int window(Comm& comm, void* buffer, std::size_t size, int flags, void* out) {
  auto** place = static_cast<void**>(out);
  *place = nullptr;
  if ((flags & kSymmetric) != 0) refuse(&comm, "NCCL_WIN_COLL_SYMMETRIC");
  const int result = real::ncclCommWindowRegister(comm.real, buffer, size, out, flags);
  const Gate::Lock lock(gate().mutex);
  awaited().push_back({&comm, place, {buffer, size, flags, nullptr, nullptr}});
  return result;
}

void settle_windows(const std::vector<Comm*>& comms) {
  const Gate::Lock lock(gate().mutex);
  auto& all = awaited();
  for (auto one = all.begin(); one != all.end();) {
    if (std::find(comms.begin(), comms.end(), one->comm) == comms.end()) {
      ++one;
      continue;
    }
    if (*one->out != nullptr) {
      one->window.handle = one->window.real = *one->out;
      one->comm->windows.push_back(one->window);
    } else if (!one->comm->blocking) {
      one->comm->refused.insert("ncclCommWindowRegister");  // nobody sees when NCCL tells its handle
    }
    one = all.erase(one);
  }
}

int drop_reduction(Comm& comm, int handle) {
  const int real = reduction_of(&comm, handle);
  const int result = real::ncclRedOpDestroy(real, comm.real);
  const Gate::Lock lock(gate().mutex);
  std::erase_if(comm.reductions, [handle](const Reduction& one) { return one.handle == handle; });
  return result;
}

void leave(Comm& comm) {
  for (Window& one : comm.windows) real::ncclCommWindowDeregister(comm.real, std::exchange(one.real, nullptr));
  for (auto& one : comm.registrations) {
    if (one->real != nullptr) real::ncclCommDeregister(comm.real, std::exchange(one->real, nullptr));
  }
  for (const Reduction& one : comm.reductions) real::ncclRedOpDestroy(one.real, comm.real);
}

int replay(Comm& comm, std::string& why) {
  for (auto& one : comm.registrations) {
    const int bad = real::ncclCommRegister(comm.real, one->address, one->size, &one->real);
    if (bad != kSuccess) return why = "ncclCommRegister", bad;
  }
  for (Window& one : comm.windows) {
    int bad = real::ncclCommWindowRegister(comm.real, one.address, one.size, &one.real, one.flags);
    if (bad == kInProgress) bad = finish(comm);
    if (bad != kSuccess) return why = "ncclCommWindowRegister", bad;
  }
  for (Reduction& one : comm.reductions) {
    void* scalar = one.residence == kOnHost ? static_cast<void*>(one.scalar) : one.address;
    const int bad = real::ncclRedOpCreatePreMulSum(&one.real, scalar, one.type, one.residence, comm.real);
    if (bad != kSuccess) return why = "ncclRedOpCreatePreMulSum", bad;
  }
  return kSuccess;
}

}  // namespace registered

namespace hook {

int ncclCommRegister(void* handle, void* buffer, std::size_t size, void* out) {
  Comm* comm = of(handle);
  if (comm == nullptr || out == nullptr) return real::ncclCommRegister(real_of(handle), buffer, size, out);
  const Local local;
  auto one = std::make_unique<Registration>(Registration{buffer, size, nullptr});
  const int result = real::ncclCommRegister(comm->real, buffer, size, &one->real);
  if (result != kSuccess) return result;
  *static_cast<void**>(out) = one.get();
  const Gate::Lock lock(gate().mutex);
  comm->registrations.push_back(std::move(one));
  return result;
}

int ncclCommDeregister(void* handle, void* registration) {
  Comm* comm = of(handle);
  if (comm == nullptr) return real::ncclCommDeregister(handle, registration);
  const Local local;
  std::unique_ptr<Registration> known;
  {
    const Gate::Lock lock(gate().mutex);
    auto& all = comm->registrations;
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.get() == registration; });
    if (found == all.end()) return registration == nullptr ? kSuccess : kInvalidArgument;
    known = std::move(*found);
    all.erase(found);
  }
  // NCCL gives the same buffer no second registration and does not return one for what it need not register.
  return known->real == nullptr ? kSuccess : real::ncclCommDeregister(comm->real, known->real);
}

int ncclCommWindowDeregister(void* handle, void* window) {
  Comm* comm = of(handle);
  if (comm == nullptr && handle != nullptr) return real::ncclCommWindowDeregister(handle, window);  // NCCL's own
  const Local local;
  void* const real = window_of(comm, window);
  const int result = real::ncclCommWindowDeregister(real_of(handle), real);
  if (comm == nullptr) return result;
  const Gate::Lock lock(gate().mutex);
  std::erase_if(comm->windows, [window](const Window& one) { return one.handle == window; });
  return result;
}

int ncclWinGetUserPtr(void* handle, void* window, void* out) {
  const Local local;
  return real::ncclWinGetUserPtr(real_of(handle), window_of(of(handle), window), out);
}

int ncclRedOpCreatePreMulSum(void* out, void* scalar, int type, int residence, void* handle) {
  Comm* comm = of(handle);
  if (comm == nullptr || out == nullptr || scalar == nullptr) {
    return real::ncclRedOpCreatePreMulSum(out, scalar, type, residence, real_of(handle));
  }
  const Local local;
  Reduction made{};
  const int result = real::ncclRedOpCreatePreMulSum(&made.real, scalar, type, residence, comm->real);
  if (result != kSuccess) return result;
  made.type = type;
  made.residence = residence;
  made.address = scalar;
  if (residence == kOnHost && type >= 0 && static_cast<std::size_t>(type) < kSizes.size()) {
    std::memcpy(made.scalar, scalar, kSizes[static_cast<std::size_t>(type)]);
  }
  const Gate::Lock lock(gate().mutex);
  made.handle = next_reduction++;
  comm->reductions.push_back(made);
  *static_cast<int*>(out) = made.handle;
  return result;
}

}  // namespace hook
}  // namespace moorage::nccl
