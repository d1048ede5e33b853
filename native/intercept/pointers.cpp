// What the driver says about an address in a block from cuMemAlloc is put right: for it that is a mapping, for the job
// it is an allocation. And legacy IPC for such blocks, which the driver refuses for mappings: by the broker's descriptors.
#include <unistd.h>

#include <cstring>

#include "bulk.h"
#include "control.h"
#include "hooks.h"
#include "real.h"

namespace moorage::bulk {
namespace {

// Where an allocation of the proxy's own begins, and so on. False: the address is in none.
bool own_allocation(CUdeviceptr address, CUdeviceptr& begin, std::size_t& size, CUcontext& context) {
  if (!control::active()) return false;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = covering(all, address);
  if (found == all.mappings.end() || !found->second.own) return false;
  begin = found->first;
  size = found->second.asked;
  context = found->second.context;
  return true;
}

void correct(CUpointer_attribute attribute, void* data, CUdeviceptr begin, std::size_t size, CUcontext context) {
  if (data == nullptr) return;
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: std::memcpy(data, &context, sizeof context); break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: std::memcpy(data, &begin, sizeof begin); break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: std::memcpy(data, &size, sizeof size); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: {
      const bool yes = true;  // the driver writes one byte
      std::memcpy(data, &yes, sizeof yes);
      break;
    }
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
      const std::uint64_t none = 0;
      std::memcpy(data, &none, sizeof none);
      break;
    }
    default: break;
  }
}

constexpr char kIpcMark[8] = {'m', 'o', 'o', 'r', 'a', 'g', 'e', '1'};

struct IpcHandle {
  char mark[8];
  std::uint64_t process;
  std::uint64_t id;
  std::uint64_t asked;
  std::uint32_t device;
  char rest[28];
};
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));

CUresult open_handle(CUdeviceptr* pointer, const IpcHandle& handle) {
  // The driver, too, refuses to open what the same process exported.
  if (handle.process == control::process()) return CUDA_ERROR_INVALID_CONTEXT;
  State& all = state();
  CUcontext context = nullptr;
  CUdevice device = -1;
  if (real::cuCtxGetCurrent(&context) != CUDA_SUCCESS || real::cuCtxGetDevice(&device) != CUDA_SUCCESS) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  {
    const std::lock_guard lock(all.mutex);
    for (auto& [address, mapping] : all.mappings) {
      if (mapping.ipc_opens == 0 || mapping.context != context || mapping.block->owner != handle.process ||
          mapping.block->owner_id != handle.id) {
        continue;
      }
      ++mapping.ipc_opens;
      *pointer = address;
      return CUDA_SUCCESS;
    }
  }
  const control::Reply reply = control::ask(wire::Type::Fetch, handle.process, handle.id, -1);
  if (!reply.arrived) return CUDA_ERROR_OPERATING_SYSTEM;
  if (reply.descriptor < 0) return CUDA_ERROR_INVALID_VALUE;  // freed by its owner, or not of this pod
  Block block;
  CUresult result = real::cuMemImportFromShareableHandle(
      &block.real, reinterpret_cast<void*>(static_cast<std::intptr_t>(reply.descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(reply.descriptor);
  if (result != CUDA_SUCCESS) return result;
  block.size = reply.found.size;
  auto access = access_from(context, device);
  CUdeviceptr address = 0;
  result = map_somewhere(block, &address, access);
  if (result != CUDA_SUCCESS) {
    real::cuMemRelease(block.real);
    return result;
  }
  {
    const std::lock_guard lock(all.mutex);
    auto added = add_block(all, block.real, block.size, located(block.real, static_cast<int>(handle.device)));
    added->owner = handle.process;
    added->owner_id = handle.id;
    added->exportable = false;
    added->mappings = 1;
    all.mappings[address] = {.size = block.size,
                             .block = std::move(added),
                             .access = std::move(access),
                             .own = true,
                             .asked = handle.asked,
                             .context = context,
                             .ipc_opens = 1};
  }
  control::new_block();
  *pointer = address;
  return CUDA_SUCCESS;
}

// The handle of an allocation of the proxy's own. False: it is none.
bool describe_own(CUdeviceptr address, IpcHandle& parts) {
  if (!control::active()) return false;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = covering(all, address);
  if (found == all.mappings.end() || !found->second.own || found->second.ipc_opens != 0) return false;
  std::memcpy(parts.mark, kIpcMark, sizeof kIpcMark);
  parts.process = found->second.block->owner;
  parts.id = found->second.block->owner_id;
  parts.asked = found->second.asked;
  parts.device = static_cast<std::uint32_t>(found->second.block->device);
  found->second.block->shared = true;
  return true;
}

bool ours(const CUipcMemHandle& handle, IpcHandle& parts) {
  std::memcpy(&parts, &handle, sizeof parts);
  return std::memcmp(parts.mark, kIpcMark, sizeof kIpcMark) == 0 && control::active();
}

void foreign_ipc(const char* api, std::uint64_t address) {
  if (!control::active()) return;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  settle(all, api, address);
  refuse(all, api, address, 0);
}

}  // namespace
}  // namespace moorage::bulk

namespace moorage::hook {

using namespace bulk;

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  CUdeviceptr begin = 0;
  std::size_t asked = 0;
  CUcontext context = nullptr;
  if (!own_allocation(address, begin, asked, context)) return real::cuMemGetAddressRange_v2(base, size, address);
  if (base != nullptr) *base = begin;
  if (size != nullptr) *size = asked;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  const CUresult result = real::cuPointerGetAttribute(data, attribute, address);
  CUdeviceptr begin = 0;
  std::size_t size = 0;
  CUcontext context = nullptr;
  if (result == CUDA_SUCCESS && own_allocation(address, begin, size, context)) {
    correct(attribute, data, begin, size, context);
  }
  return result;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr address) {
  const CUresult result = real::cuPointerGetAttributes(count, attributes, data, address);
  CUdeviceptr begin = 0;
  std::size_t size = 0;
  CUcontext context = nullptr;
  if (result == CUDA_SUCCESS && own_allocation(address, begin, size, context)) {
    for (unsigned i = 0; i < count; ++i) correct(attributes[i], data[i], begin, size, context);
  }
  return result;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  IpcHandle parts{};
  if (handle != nullptr && describe_own(address, parts)) {
    // Whoever gets the handle asks the broker for the block: it must know it by then. Its answer says so.
    control::tell_now();
    const control::Reply known = control::ask(wire::Type::Fetch, parts.process, parts.id, -1);
    if (known.descriptor >= 0) close(known.descriptor);
    std::memcpy(handle, &parts, sizeof parts);
    return CUDA_SUCCESS;
  }
  const CUresult result = real::cuIpcGetMemHandle(handle, address);
  if (result == CUDA_SUCCESS) foreign_ipc("cuIpcGetMemHandle", address);
  return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  IpcHandle parts;
  if (pointer != nullptr && ours(handle, parts)) return open_handle(pointer, parts);
  const CUresult result = real::cuIpcOpenMemHandle(pointer, handle, flags);
  if (result == CUDA_SUCCESS) foreign_ipc("cuIpcOpenMemHandle", *pointer);
  return result;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  IpcHandle parts;
  if (pointer != nullptr && ours(handle, parts)) return open_handle(pointer, parts);
  const CUresult result = real::cuIpcOpenMemHandle_v2(pointer, handle, flags);
  if (result == CUDA_SUCCESS) foreign_ipc("cuIpcOpenMemHandle", *pointer);
  return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  State& all = state();
  Mapping mapping;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.mappings.find(pointer);
    if (found != all.mappings.end() && found->second.ipc_opens != 0) {
      if (--found->second.ipc_opens != 0) return CUDA_SUCCESS;
      mapping = std::move(found->second);
      all.mappings.erase(found);
    }
    settle(all, "cuIpcOpenMemHandle", pointer);
  }
  if (mapping.block == nullptr) return real::cuIpcCloseMemHandle(pointer);
  const CUresult result = wait_for(mapping.context);
  unmap_own(pointer, mapping);
  return result;
}

}  // namespace moorage::hook
