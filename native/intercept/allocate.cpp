// cuMemAlloc and its kin, backed by blocks; and peer access, which the driver grants to its own allocations only.
#include <algorithm>

#include "bulk.h"
#include "captures.h"
#include "control.h"
#include "hooks.h"
#include "real.h"

namespace moorage::bulk {
namespace {

struct Here {
  CUdevice device = -1;
  CUcontext context = nullptr;
};

// The current context and its device, when bulk memory works there.
bool here(Here& place) {
  return real::cuCtxGetDevice(&place.device) == CUDA_SUCCESS &&
         real::cuCtxGetCurrent(&place.context) == CUDA_SUCCESS && place.context != nullptr && supported(place.device);
}

CUmemAccessDesc read_write(int device) {
  return {{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

// CUDA_ERROR_NOT_SUPPORTED: let the driver do it.
CUresult allocate(CUdeviceptr* pointer, std::size_t size) {
  Here place;
  if (pointer == nullptr || !here(place)) return CUDA_ERROR_NOT_SUPPORTED;
  const std::size_t whole = rounded(size, place.device);
  if (whole == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  bury();
  auto access = access_from(place.context, place.device);
  if (const CUdeviceptr kept = take_freed(whole, size, place.device, place.context, access)) {
    *pointer = kept;
    return CUDA_SUCCESS;
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {place.device}};
  properties.allocFlags.gpuDirectRDMACapable = rdma_supported(place.device) ? 1 : 0;
  CUmemGenericAllocationHandle real = 0;
  CUresult result = without_freed([&] { return real::cuMemCreate(&real, whole, &properties, 0); });
  if (result != CUDA_SUCCESS && properties.allocFlags.gpuDirectRDMACapable != 0 && result != CUDA_ERROR_OUT_OF_MEMORY) {
    properties.allocFlags.gpuDirectRDMACapable = 0;
    result = without_freed([&] { return real::cuMemCreate(&real, whole, &properties, 0); });
  }
  if (result != CUDA_SUCCESS) return result == CUDA_ERROR_OUT_OF_MEMORY ? result : CUDA_ERROR_NOT_SUPPORTED;

  Block block;
  block.real = real;
  block.size = whole;
  CUdeviceptr address = 0;
  result = map_somewhere(block, &address, access);
  if (result != CUDA_SUCCESS) {
    real::cuMemRelease(real);
    return result;
  }
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    auto added = add_block(all, real, whole, place.device);
    added->rdma = properties.allocFlags.gpuDirectRDMACapable != 0;
    added->mappings = 1;
    all.mappings[address] = {.size = whole,
                             .block = std::move(added),
                             .access = std::move(access),
                             .own = true,
                             .asked = size,
                             .context = place.context};
  }
  control::new_block();
  *pointer = address;
  return CUDA_SUCCESS;
}

// CUDA_ERROR_NOT_SUPPORTED: not ours.
CUresult release(CUdeviceptr pointer) {
  State& all = state();
  CUcontext context = nullptr;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.mappings.find(pointer);
    if (found == all.mappings.end() || !found->second.own || found->second.ipc_opens != 0) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (std::find(all.zombies.begin(), all.zombies.end(), pointer) != all.zombies.end()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    context = found->second.context;
  }
  // Waiting for the device is what a stream capture forbids: the memory then lives on until the capture has ended.
  const bool capturing = captures::running() != 0;
  const CUresult result = capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : wait_for(context);
  Mapping mapping;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.mappings.find(pointer);
    if (found == all.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) {
      all.zombies.push_back(pointer);
      return CUDA_SUCCESS;
    }
    mapping = std::move(found->second);
    all.mappings.erase(found);
  }
  if (result != CUDA_SUCCESS || !keep_freed(pointer, mapping)) unmap_own(pointer, mapping);
  bury();
  return result;
}

void grant(CUcontext owner, int device, CUmemAccess_flags flags) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const std::pair<int, CUcontext> pair{device, owner};
  std::erase(all.peers, pair);
  if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) all.peers.push_back(pair);
  for (auto& [address, mapping] : all.mappings) {
    // The first one is the context's own device: not always the block's, when another process's memory was opened.
    if (!mapping.own || mapping.context != owner || mapping.access.front().location.id == device) continue;
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, flags};
    real::cuMemSetAccess(address, mapping.size, &access, 1);
    std::erase_if(mapping.access, [&](const CUmemAccessDesc& one) { return one.location.id == device; });
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) mapping.access.push_back(access);
  }
}

void managed_added(const char* api, CUdeviceptr address, std::size_t size) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  refuse(all, api, address, size);
}

}  // namespace

std::vector<CUmemAccessDesc> access_from(CUcontext context, int device) {
  std::vector<CUmemAccessDesc> access{read_write(device)};
  State& all = state();
  const std::lock_guard lock(all.mutex);
  for (const auto& [peer, owner] : all.peers) {
    if (owner == context && peer != device) access.push_back(read_write(peer));
  }
  return access;
}

int located(CUmemGenericAllocationHandle real, int otherwise) {
  CUmemAllocationProp properties{};
  const bool known = real::cuMemGetAllocationPropertiesFromHandle(&properties, real) == CUDA_SUCCESS &&
                     properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  return known ? properties.location.id : otherwise;
}

}  // namespace moorage::bulk

namespace moorage::hook {

using namespace bulk;

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
  if (manages(size)) {
    const CUresult result = allocate(pointer, size);
    if (result != CUDA_ERROR_NOT_SUPPORTED) return result;
  }
  return without_freed([&] { return real::cuMemAlloc_v2(pointer, size); });
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* pointer, size_t* pitch, size_t width, size_t height, unsigned element) {
  if (pointer == nullptr || pitch == nullptr || height == 0 || width == 0 || !manages(width * height)) {
    return real::cuMemAllocPitch_v2(pointer, pitch, width, height, element);
  }
  // The driver says what the pitch is: one row costs little.
  CUdeviceptr row = 0;
  CUresult result = real::cuMemAllocPitch_v2(&row, pitch, width, 1, element);
  if (result != CUDA_SUCCESS) return result;
  real::cuMemFree_v2(row);
  result = *pitch > SIZE_MAX / height ? CUDA_ERROR_OUT_OF_MEMORY : allocate(pointer, *pitch * height);
  if (result != CUDA_ERROR_NOT_SUPPORTED) return result;
  return without_freed([&] { return real::cuMemAllocPitch_v2(pointer, pitch, width, height, element); });
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  if (control::active() && pointer != 0) {
    const CUresult result = release(pointer);
    if (result != CUDA_ERROR_NOT_SUPPORTED) return result;
    State& all = state();
    const std::lock_guard lock(all.mutex);
    settle(all, "cuMemAllocManaged", pointer);
  }
  return real::cuMemFree_v2(pointer);
}

CUresult cuMemAllocManaged(CUdeviceptr* pointer, size_t size, unsigned flags) {
  const CUresult result = real::cuMemAllocManaged(pointer, size, flags);
  if (result == CUDA_SUCCESS) managed_added("cuMemAllocManaged", *pointer, size);
  return result;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  const CUresult result = real::cuCtxEnablePeerAccess(peer, flags);
  CUdevice device = -1;
  if (result == CUDA_SUCCESS && control::active() && real::cuCtxGetDevice(&device) == CUDA_SUCCESS) {
    grant(peer, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }
  return result;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  const CUresult result = real::cuCtxDisablePeerAccess(peer);
  CUdevice device = -1;
  if (result == CUDA_SUCCESS && control::active() && real::cuCtxGetDevice(&device) == CUDA_SUCCESS) {
    grant(peer, device, CU_MEM_ACCESS_FLAGS_PROT_NONE);
  }
  return result;
}

}  // namespace moorage::hook
