// cuMemCreate and what is done with its handles. The job holds handles of the proxy's own, because the driver's change
// when memory comes back.
#include <unistd.h>

#include <algorithm>

#include "bulk.h"
#include "control.h"
#include "hooks.h"
#include "real.h"

namespace moorage::bulk {
namespace {

constexpr unsigned kShareable = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// The driver's handle for one of the job's; anything else is the driver's own already.
CUmemGenericAllocationHandle real_handle(CUmemGenericAllocationHandle handle) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto block = block_of(all, handle);
  return block == nullptr ? handle : block->real;
}

void note_refusal(const char* api, std::uint64_t address, std::uint64_t size) {
  if (!control::active()) return;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  refuse(all, api, address, size);
}

bool can_manage(const CUmemAllocationProp* properties) {
  return properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && supported(properties->location.id) &&
         (static_cast<unsigned>(properties->requestedHandleTypes) & ~kShareable) == 0;
}

}  // namespace
}  // namespace moorage::bulk

namespace moorage::hook {

using namespace bulk;

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  if (handle == nullptr || !manages(std::max(size, kBulkMin)) || !can_manage(properties)) {
    const CUresult result = without_freed([&] { return real::cuMemCreate(handle, size, properties, flags); });
    if (result == CUDA_SUCCESS && manages(kBulkMin)) note_refusal("cuMemCreate", *handle, size);
    return result;
  }
  CUmemAllocationProp shareable = *properties;
  shareable.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle real = 0;
  const CUresult result = without_freed([&] { return real::cuMemCreate(&real, size, &shareable, flags); });
  if (result != CUDA_SUCCESS) return result;
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    const auto block = add_block(all, real, size, properties->location.id);
    block->by_handle = true;
    block->rdma = properties->allocFlags.gpuDirectRDMACapable != 0;
    block->asked_handles = static_cast<unsigned>(properties->requestedHandleTypes);
    block->references = 1;
    *handle = handle_of(*block);
  }
  control::new_block();
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    settle(all, "cuMemCreate", handle);
    settle(all, "cuMemImportFromShareableHandle", handle);
    if (const auto block = block_of(all, handle)) {
      if (block->references == 0) return CUDA_ERROR_INVALID_VALUE;
      --block->references;
      drop_if_unused(all, block);
      return CUDA_SUCCESS;
    }
  }
  return real::cuMemRelease(handle);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    if (const auto block = block_of(all, handle)) {
      if (block->references == 0) return CUDA_ERROR_INVALID_VALUE;
      const CUresult result = real::cuMemMap(address, size, offset, block->real, flags);
      if (result == CUDA_SUCCESS) {
        ++block->mappings;
        all.mappings[address] = {.size = size, .offset = offset, .block = block, .access = {}};
      }
      return result;
    }
  }
  return real::cuMemMap(address, size, offset, handle, flags);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  const CUresult result = real::cuMemUnmap(address, size);
  if (result != CUDA_SUCCESS || !control::active()) return result;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  for (auto at = all.mappings.lower_bound(address); at != all.mappings.end() && at->first < address + size;) {
    const auto block = std::move(at->second.block);
    at = all.mappings.erase(at);
    --block->mappings;
    drop_if_unused(all, block);
  }
  return result;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
  const CUresult result = real::cuMemSetAccess(address, size, access, count);
  if (result != CUDA_SUCCESS || !control::active()) return result;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  for (auto at = all.mappings.lower_bound(address); at != all.mappings.end() && at->first < address + size; ++at) {
    for (const CUmemAccessDesc* one = access; one != access + count; ++one) {
      std::erase_if(at->second.access, [&](const CUmemAccessDesc& known) {
        return known.location.type == one->location.type && known.location.id == one->location.id;
      });
      if (one->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) at->second.access.push_back(*one);
    }
  }
  return result;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  State& all = state();
  std::uint64_t owner = 0;
  std::uint64_t id = 0;
  bool here = false;
  CUmemGenericAllocationHandle real = handle;
  {
    const std::lock_guard lock(all.mutex);
    if (const auto block = block_of(all, handle)) {
      if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || out == nullptr || flags != 0 ||
          (block->asked_handles & kShareable) == 0) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      owner = block->owner;
      id = block->owner_id;
      here = block->exportable;
      real = block->real;
    }
  }
  if (id == 0) return real::cuMemExportToShareableHandle(out, handle, type, flags);
  if (here) {
    const CUresult result = real::cuMemExportToShareableHandle(out, real, type, flags);
    // The broker must recognise this very descriptor when another process of the job brings it.
    if (result == CUDA_SUCCESS) control::tell_now();
    if (result == CUDA_SUCCESS) control::ask(wire::Type::Exported, owner, id, *static_cast<int*>(out));
    return result;
  }
  // The driver does not export what was imported, as everything was after a restore: the descriptor that is kept.
  const control::Reply reply = control::ask(wire::Type::Fetch, owner, id, -1);
  if (!reply.arrived || reply.descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(out) = reply.descriptor;
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                        CUmemAllocationHandleType type) {
  CUmemGenericAllocationHandle real = 0;
  const CUresult result = real::cuMemImportFromShareableHandle(&real, descriptor, type);
  if (result != CUDA_SUCCESS) return result;
  *handle = real;
  if (!manages(kBulkMin)) return result;
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor));
  control::Reply reply;
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) reply = control::ask(wire::Type::Identify, 0, 0, fd);
  if (reply.descriptor >= 0) close(reply.descriptor);
  if (!reply.arrived || reply.found.status != 0) {
    note_refusal("cuMemImportFromShareableHandle", real, 0);  // not a block of this pod
    return result;
  }
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    const auto block = add_block(all, real, reply.found.size, located(real, static_cast<int>(reply.found.device)));
    block->owner = reply.found.process;
    block->owner_id = reply.found.id;
    block->exportable = false;
    block->by_handle = true;
    block->asked_handles = kShareable;
    block->references = 1;
    *handle = handle_of(*block);
  }
  control::new_block();
  return result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    if (const auto block = block_of(all, handle)) {
      const CUresult result = real::cuMemGetAllocationPropertiesFromHandle(properties, block->real);
      if (result == CUDA_SUCCESS) {
        properties->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(block->asked_handles);
      }
      return result;
    }
  }
  return real::cuMemGetAllocationPropertiesFromHandle(properties, handle);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = covering(all, reinterpret_cast<CUdeviceptr>(address));
    if (found != all.mappings.end()) {
      // What cuMemAlloc answered has no handle for the driver either.
      if (found->second.own || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
      ++found->second.block->references;
      *handle = handle_of(*found->second.block);
      return CUDA_SUCCESS;
    }
  }
  return real::cuMemRetainAllocationHandle(handle, address);
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* properties) {
  const CUresult result = real::cuMulticastCreate(handle, properties);
  if (result == CUDA_SUCCESS) note_refusal("cuMulticastCreate", *handle, properties->size);
  return result;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle multicast, size_t offset, CUmemGenericAllocationHandle handle,
                            size_t memory_offset, size_t size, unsigned long long flags) {
  return real::cuMulticastBindMem(multicast, offset, real_handle(handle), memory_offset, size, flags);
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo* list, unsigned count, CUstream stream) {
  std::vector<CUarrayMapInfo> translated(list, list + (list == nullptr ? 0 : count));
  for (CUarrayMapInfo& one : translated) {
    if (one.memHandleType == CU_MEM_HANDLE_TYPE_GENERIC) one.memHandle.memHandle = real_handle(one.memHandle.memHandle);
  }
  note_refusal("cuMemMapArrayAsync", 0, 0);  // a sparse array would lose its memory when blocks go
  return real::cuMemMapArrayAsync(translated.data(), count, stream);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo* list, unsigned count, CUstream stream) {
  std::vector<CUarrayMapInfo> translated(list, list + (list == nullptr ? 0 : count));
  for (CUarrayMapInfo& one : translated) {
    if (one.memHandleType == CU_MEM_HANDLE_TYPE_GENERIC) one.memHandle.memHandle = real_handle(one.memHandle.memHandle);
  }
  note_refusal("cuMemMapArrayAsync", 0, 0);
  return real::cuMemMapArrayAsync_ptsz(translated.data(), count, stream);
}

}  // namespace moorage::hook
