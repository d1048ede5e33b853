// Questions, which are answered while the communicators are gone, and calls that pass with a refusal at prepare.
#include "comm.h"
#include "hooks.h"
#include "real.h"

namespace moorage::nccl {
namespace {

// A communicator that is none of the job's is NCCL's own, and asks while all are made anew: it must not wait for that.
bool is_foreign(void* handle) { return handle != nullptr && of(handle) == nullptr; }

// The device API hands out addresses of the communicator as it is.
template <typename Ask>
auto exposed(void* handle, const char* api, Ask ask) {
  if (is_foreign(handle)) return ask(handle);
  if (Comm* comm = of(handle)) refuse(comm, api);
  const Local local;
  return ask(real_of(handle));
}

template <typename Ask>
auto exposed_window(void* window, const char* api, Ask ask) {
  refuse(nullptr, api);
  const Local local;
  return ask(window_of(nullptr, window));
}

template <typename Ask>
auto passed(void* handle, Ask ask) {
  if (is_foreign(handle)) return ask(handle);
  const Local local;
  return ask(real_of(handle));
}

int answer(void* out, int value) {
  if (out == nullptr) return kInvalidArgument;
  *static_cast<int*>(out) = value;
  return kSuccess;
}

}  // namespace

namespace hook {

int ncclCommCount(void* handle, void* out) {
  Comm* comm = of(handle);
  if (comm == nullptr) return real::ncclCommCount(handle, out);
  const Gate::Lock lock(gate().mutex);
  return answer(out, comm->size);
}

int ncclCommUserRank(void* handle, void* out) {
  Comm* comm = of(handle);
  if (comm == nullptr) return real::ncclCommUserRank(handle, out);
  const Gate::Lock lock(gate().mutex);
  return answer(out, comm->rank);
}

int ncclCommCuDevice(void* handle, void* out) {
  Comm* comm = of(handle);
  if (comm == nullptr) return real::ncclCommCuDevice(handle, out);
  const Gate::Lock lock(gate().mutex);
  if (comm->device < 0 && !comm->making && comm->real != nullptr) return real::ncclCommCuDevice(comm->real, out);
  return answer(out, comm->device);
}

int ncclCommGetAsyncError(void* handle, void* out) {
  Comm* comm = of(handle);
  if (comm == nullptr || out == nullptr) return real::ncclCommGetAsyncError(real_of(handle), out);
  Gate::Lock lock(gate().mutex);
  if (!gate().torn) look_at_pending(lock, *comm);
  if (comm->making || !comm->pending.empty()) return answer(out, kInProgress);
  if (gate().torn || comm->real == nullptr || comm->ending) return answer(out, kSuccess);
  int state = kSuccess;
  const int result = real::ncclCommGetAsyncError(comm->real, &state);
  // A blocking communicator is never in progress: whoever called waits until it is over.
  return state == kInProgress && comm->blocking ? answer(out, kSuccess) : (answer(out, state), result);
}

void* ncclGetLastError(void* handle) {
  Comm* comm = of(handle);
  if (comm == nullptr) return real::ncclGetLastError(handle);
  const Gate::Lock lock(gate().mutex);
  return real::ncclGetLastError(gate().torn ? nullptr : comm->real);
}

int ncclCommMemStats(void* handle, int stat, void* value) {
  return passed(handle, [&](void* real) { return real::ncclCommMemStats(real, stat, value); });
}
int ncclCommQueryProperties(void* handle, void* out) {
  return passed(handle, [&](void* real) { return real::ncclCommQueryProperties(real, out); });
}

int ncclCommSuspend(void* handle, int flags) {
  return exposed(handle, "ncclCommSuspend", [&](void* real) { return real::ncclCommSuspend(real, flags); });
}
int ncclCommResume(void* handle) {
  const int result = passed(handle, [&](void* real) { return real::ncclCommResume(real); });
  if (Comm* comm = of(handle); comm != nullptr && result == kSuccess) accept(comm, "ncclCommSuspend");
  return result;
}
int ncclCommRevoke(void* handle, int flags) {
  return exposed(handle, "ncclCommRevoke", [&](void* real) { return real::ncclCommRevoke(real, flags); });
}

// ---- one-sided operations

int ncclPutSignal(void* local, std::size_t count, int type, int peer, void* window, std::size_t offset, int signal,
                  int context, unsigned flags, void* handle, void* stream) {
  void* const target = window_of(of(handle), window);
  return exposed(handle, "ncclPutSignal", [&](void* real) {
    return real::ncclPutSignal(local, count, type, peer, target, offset, signal, context, flags, real, stream);
  });
}
int ncclSignal(int peer, int signal, int context, unsigned flags, void* handle, void* stream) {
  return exposed(handle, "ncclSignal",
                 [&](void* real) { return real::ncclSignal(peer, signal, context, flags, real, stream); });
}
int ncclWaitSignal(int count, void* signals, void* handle, void* stream) {
  return exposed(handle, "ncclWaitSignal",
                 [&](void* real) { return real::ncclWaitSignal(count, signals, real, stream); });
}

// ---- the device API

int ncclDevCommCreate(void* handle, void* wanted, void* out) {
  return exposed(handle, "ncclDevCommCreate", [&](void* real) { return real::ncclDevCommCreate(real, wanted, out); });
}
int ncclDevCommDestroy(void* handle, void* device) {
  return passed(handle, [&](void* real) { return real::ncclDevCommDestroy(real, device); });
}
int ncclGinBarrierCreateRequirement(void* handle, Team team, int count, void* out, void* requirement) {
  return passed(handle, [&](void* real) {
    return real::ncclGinBarrierCreateRequirement(real, team, count, out, requirement);
  });
}
Team ncclTeamCft(void* handle, int mode) {
  return passed(handle, [&](void* real) { return real::ncclTeamCft(real, mode); });
}
Team ncclTeamCftMultimem(void* handle) {
  return passed(handle, [](void* real) { return real::ncclTeamCftMultimem(real); });
}
Team ncclTeamLsa(void* handle) {
  return passed(handle, [](void* real) { return real::ncclTeamLsa(real); });
}
Team ncclTeamRail(void* handle) {
  return passed(handle, [](void* real) { return real::ncclTeamRail(real); });
}
Team ncclTeamWorld(void* handle) {
  return passed(handle, [](void* real) { return real::ncclTeamWorld(real); });
}
int ncclTeamRankToLsa(void* handle, Team team, int rank) {
  return passed(handle, [&](void* real) { return real::ncclTeamRankToLsa(real, team, rank); });
}
int ncclTeamRankToWorld(void* handle, Team team, int rank) {
  return passed(handle, [&](void* real) { return real::ncclTeamRankToWorld(real, team, rank); });
}

int ncclGetCftDeviceLeInfo(void* window, std::size_t offset, int peer, Team team, void* id, void* at) {
  return exposed_window(window, "ncclGetCftDeviceLeInfo", [&](void* real) {
    return real::ncclGetCftDeviceLeInfo(real, offset, peer, team, id, at);
  });
}
int ncclGetMultimemDeviceLeInfo(void* window, std::size_t offset, void* id, void* at) {
  return exposed_window(window, "ncclGetMultimemDeviceLeInfo",
                        [&](void* real) { return real::ncclGetMultimemDeviceLeInfo(real, offset, id, at); });
}
int ncclGetPeerDeviceLeInfo(void* window, std::size_t offset, int peer, void* id, void* at) {
  return exposed_window(window, "ncclGetPeerDeviceLeInfo",
                        [&](void* real) { return real::ncclGetPeerDeviceLeInfo(real, offset, peer, id, at); });
}
int ncclGetLsaDevicePointer(void* window, std::size_t offset, int rank, void* out) {
  return exposed_window(window, "ncclGetLsaDevicePointer",
                        [&](void* real) { return real::ncclGetLsaDevicePointer(real, offset, rank, out); });
}
int ncclGetLsaMultimemDevicePointer(void* window, std::size_t offset, void* out) {
  return exposed_window(window, "ncclGetLsaMultimemDevicePointer",
                        [&](void* real) { return real::ncclGetLsaMultimemDevicePointer(real, offset, out); });
}
int ncclGetMultimemDevicePointer(void* window, std::size_t offset, Multimem multimem, void* out) {
  return exposed_window(window, "ncclGetMultimemDevicePointer", [&](void* real) {
    return real::ncclGetMultimemDevicePointer(real, offset, multimem, out);
  });
}
int ncclGetPeerDevicePointer(void* window, std::size_t offset, int peer, void* out) {
  return exposed_window(window, "ncclGetPeerDevicePointer",
                        [&](void* real) { return real::ncclGetPeerDevicePointer(real, offset, peer, out); });
}

}  // namespace hook
}  // namespace moorage::nccl
