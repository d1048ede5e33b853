#include "bulk.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "captures.h"
#include "control.h"
#include "gate.h"
#include "hooks.h"
#include "callers.h"
#include "real.h"

namespace moorage::bulk {
namespace {

constexpr std::uint64_t kHandleMark = 0x4D47'0000'0000'0000;  // "MG": no handle of the driver's looks so
constexpr std::uint64_t kHandleMask = 0xFFFF'0000'0000'0000;

// 0: not asked yet, 1: no, 2: yes.
std::atomic<int> support[kDevices];
std::atomic<int> rdma_support[kDevices];
std::atomic<std::size_t> grain[kDevices];

bool attribute(int device, CUdevice_attribute which) {
  int value = 0;
  return real::cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS && value != 0;
}

bool remembered(std::atomic<int>& slot, bool (*ask)(int), int device) {
  int known = slot.load(std::memory_order_relaxed);
  if (known == 0) {
    known = ask(device) ? 2 : 1;
    slot.store(known, std::memory_order_relaxed);
  }
  return known == 2;
}

}  // namespace

State& state() {
  static State& one = *new State;
  return one;
}

CUmemGenericAllocationHandle handle_of(const Block& block) { return kHandleMark | block.id; }

std::shared_ptr<Block> block_of(State& all, CUmemGenericAllocationHandle handle) {
  if ((handle & kHandleMask) != kHandleMark) return nullptr;
  const auto found = all.blocks.find(handle & ~kHandleMask);
  return found == all.blocks.end() ? nullptr : found->second;
}

std::map<CUdeviceptr, Mapping>::iterator covering(State& all, CUdeviceptr address) {
  auto found = all.mappings.upper_bound(address);
  if (found == all.mappings.begin()) return all.mappings.end();
  --found;
  const std::size_t size = found->second.own ? found->second.asked : found->second.size;
  return address < found->first + size ? found : all.mappings.end();
}

std::shared_ptr<Block> add_block(State& all, CUmemGenericAllocationHandle real, std::size_t size, int device) {
  auto block = std::make_shared<Block>();
  block->id = all.next++;
  block->real = real;
  block->size = size;
  block->device = device;
  block->owner = control::process();
  block->owner_id = block->id;
  all.blocks[block->id] = block;
  all.fresh.push_back(block->id);
  return block;
}

void drop_if_unused(State& all, const std::shared_ptr<Block>& block) {
  if (block->references != 0 || block->mappings != 0) return;
  if (block->resident) real::cuMemRelease(block->real);
  if (block->announced) {
    all.forgotten.push_back(block->id);
    all.last_forgotten_ns = gate::boottime_ns();
    control::block_went();
  }
  all.blocks.erase(block->id);
}

void refuse(State& all, const char* api, std::uint64_t address, std::uint64_t size) {
  constexpr std::size_t kMost = 1000;
  if (all.refusals.size() < kMost) all.refusals.push_back({api, address, size});
}

void settle(State& all, const char* api, std::uint64_t address) {
  const auto found = std::find_if(all.refusals.begin(), all.refusals.end(), [&](const Refusal& refusal) {
    return refusal.address == address && refusal.api == api;
  });
  if (found != all.refusals.end()) all.refusals.erase(found);
}

CUresult map_somewhere(const Block& block, CUdeviceptr* address, std::vector<CUmemAccessDesc>& access) {
  CUresult result = real::cuMemAddressReserve(address, block.size, 0, 0, 0);
  if (result != CUDA_SUCCESS) return result;
  result = real::cuMemMap(*address, block.size, 0, block.real, 0);
  if (result == CUDA_SUCCESS) {
    result = real::cuMemSetAccess(*address, block.size, access.data(), access.size());
    if (result == CUDA_SUCCESS) return result;
    real::cuMemUnmap(*address, block.size);
  }
  real::cuMemAddressFree(*address, block.size);
  return result;
}

void unmap_own(CUdeviceptr address, const Mapping& mapping) {
  if (mapping.mapped) real::cuMemUnmap(address, mapping.size);
  real::cuMemAddressFree(address, mapping.size);
  State& all = state();
  const std::lock_guard lock(all.mutex);
  --mapping.block->mappings;
  drop_if_unused(all, mapping.block);
}

CUresult wait_for(CUcontext context) {
  if (context == nullptr) return CUDA_SUCCESS;
  if (real::cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return CUDA_SUCCESS;  // gone, and its work with it
  const CUresult result = real::cuCtxSynchronize();
  real::cuCtxPopCurrent_v2(nullptr);
  return result;
}

void bury() {
  State& all = state();
  for (;;) {
    CUdeviceptr address = 0;
    CUcontext context = nullptr;
    {
      const std::lock_guard lock(all.mutex);
      if (all.zombies.empty() || captures::running() != 0) return;
      address = all.zombies.back();
      const auto found = all.mappings.find(address);
      if (found == all.mappings.end()) {
        all.zombies.pop_back();
        continue;
      }
      context = found->second.context;
    }
    if (wait_for(context) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return;
    Mapping mapping;
    {
      const std::lock_guard lock(all.mutex);
      const auto found = all.mappings.find(address);
      if (std::erase(all.zombies, address) == 0 || found == all.mappings.end()) continue;
      mapping = std::move(found->second);
      all.mappings.erase(found);
    }
    unmap_own(address, mapping);
  }
}

bool manages(std::size_t size) {
  return size >= kBulkMin && control::active() && !callers::is_real_nccl(gate::caller());
}

std::size_t granularity(int device) {
  std::atomic<std::size_t>& slot = grain[static_cast<std::size_t>(device) % kDevices];
  std::size_t known = slot.load(std::memory_order_relaxed);
  if (known != 0) return known;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  if (real::cuMemGetAllocationGranularity(&known, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
      known == 0) {
    known = kBulkMin;
  }
  slot.store(known, std::memory_order_relaxed);
  return known;
}

std::size_t rounded(std::size_t size, int device) {
  const std::size_t unit = granularity(device);
  return size > SIZE_MAX - unit ? 0 : (size + unit - 1) / unit * unit;
}

bool supported(int device) {
  if (device < 0 || device >= kDevices) return false;
  return remembered(
      support[device],
      [](int one) {
        return attribute(one, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
               attribute(one, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
      },
      device);
}

bool rdma_supported(int device) {
  if (device < 0 || device >= kDevices) return false;
  return remembered(
      rdma_support[device],
      [](int one) { return attribute(one, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED); }, device);
}

void context_ended(CUcontext context) {
  State& all = state();
  std::vector<Freed> freed;
  {
    const std::lock_guard lock(all.mutex);
    freed = remove_freed(all, context);
  }
  for (const Freed& one : freed) unmap_own(one.address, one.mapping);
  for (;;) {
    CUdeviceptr address = 0;
    Mapping mapping;
    {
      const std::lock_guard lock(all.mutex);
      std::erase_if(all.peers, [&](const auto& peer) { return peer.second == context; });
      const auto found = std::find_if(all.mappings.begin(), all.mappings.end(), [&](const auto& entry) {
        return entry.second.own && entry.second.context == context;
      });
      if (found == all.mappings.end()) return;
      address = found->first;
      mapping = std::move(found->second);
      all.mappings.erase(found);
    }
    unmap_own(address, mapping);
  }
}

Totals totals() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  Totals sum{static_cast<std::uint32_t>(all.blocks.size()), 0, all.evicted};
  for (const auto& [id, block] : all.blocks) sum.bytes += block->size;
  return sum;
}

}  // namespace moorage::bulk
