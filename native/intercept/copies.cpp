// Copies from one device to another. Between allocations of its own the driver makes them with no peer access; between
// mappings, which ours are for it, it answers INVALID_VALUE unless the contexts are named.
#include "bulk.h"
#include "control.h"
#include "hooks.h"
#include "real.h"

namespace moorage::bulk {
namespace {

struct Ends {
  CUcontext to = nullptr;
  CUcontext from = nullptr;
};

CUcontext owner(State& all, CUdeviceptr address, int& device) {
  const auto found = covering(all, address);
  if (found == all.mappings.end() || !found->second.own) return nullptr;
  device = found->second.block->device;
  return found->second.context;
}

// Whose the two are. False: not both are blocks of ours, or they are on one device.
bool apart(CUdeviceptr to, CUdeviceptr from, Ends& ends) {
  if (!control::active()) return false;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  int there = -1;
  int here = -1;
  ends = {owner(all, to, there), owner(all, from, here)};
  return ends.to != nullptr && ends.from != nullptr && there != here;
}

template <typename Copy, typename Peer>
CUresult copy(CUdeviceptr to, CUdeviceptr from, Copy plain, Peer peer) {
  const CUresult result = plain();
  Ends ends;
  return result == CUDA_ERROR_INVALID_VALUE && apart(to, from, ends) ? peer(ends) : result;
}

}  // namespace
}  // namespace moorage::bulk

namespace moorage::hook {

using namespace bulk;

#define MOORAGE_COPY(name, peer)                                                       \
  CUresult name(CUdeviceptr to, CUdeviceptr from, size_t size) {                       \
    return copy(                                                                       \
        to, from, [&] { return real::name(to, from, size); },                          \
        [&](const Ends& ends) { return real::peer(to, ends.to, from, ends.from, size); }); \
  }
#define MOORAGE_COPY_ASYNC(name, peer)                                                         \
  CUresult name(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {              \
    return copy(                                                                               \
        to, from, [&] { return real::name(to, from, size, stream); },                          \
        [&](const Ends& ends) { return real::peer(to, ends.to, from, ends.from, size, stream); }); \
  }

MOORAGE_COPY(cuMemcpy, cuMemcpyPeer)
MOORAGE_COPY(cuMemcpy_ptds, cuMemcpyPeer_ptds)
MOORAGE_COPY(cuMemcpyDtoD_v2, cuMemcpyPeer)
MOORAGE_COPY(cuMemcpyDtoD_v2_ptds, cuMemcpyPeer_ptds)
MOORAGE_COPY_ASYNC(cuMemcpyAsync, cuMemcpyPeerAsync)
MOORAGE_COPY_ASYNC(cuMemcpyAsync_ptsz, cuMemcpyPeerAsync_ptsz)
MOORAGE_COPY_ASYNC(cuMemcpyDtoDAsync_v2, cuMemcpyPeerAsync)
MOORAGE_COPY_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, cuMemcpyPeerAsync_ptsz)

#undef MOORAGE_COPY
#undef MOORAGE_COPY_ASYNC

}  // namespace moorage::hook
