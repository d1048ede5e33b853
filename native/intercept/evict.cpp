// Blocks told to the broker, taken from the device, and brought back. For the control thread.
#include <unistd.h>

#include <cstdio>

#include "bulk.h"
#include "control.h"
#include "hooks.h"
#include "real.h"

namespace moorage::bulk {
namespace {

CUdeviceptr first_mapping(const State& all, const Block& block) {
  for (const auto& [address, mapping] : all.mappings) {
    if (mapping.block.get() == &block) return address;
  }
  return 0;
}

CUresult map_one(CUdeviceptr address, Mapping& mapping) {
  CUresult result = real::cuMemMap(address, mapping.size, mapping.offset, mapping.block->real, 0);
  if (result != CUDA_SUCCESS) return result;
  if (!mapping.access.empty()) {
    result = real::cuMemSetAccess(address, mapping.size, mapping.access.data(), mapping.access.size());
    if (result != CUDA_SUCCESS) {
      real::cuMemUnmap(address, mapping.size);
      return result;
    }
  }
  mapping.mapped = true;
  return CUDA_SUCCESS;
}

std::string about(CUdeviceptr address, const Mapping& mapping, const char* call, CUresult result) {
  char text[160];
  std::snprintf(text, sizeof text, "%s of block %llu at 0x%llx (%zu bytes) answered %d", call,
                static_cast<unsigned long long>(mapping.block->id), address, mapping.size, static_cast<int>(result));
  return text;
}

}  // namespace

bool next_fresh(wire::Memory& memory, int& fd) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  while (!all.fresh.empty()) {
    const auto found = all.blocks.find(all.fresh.back());
    all.fresh.pop_back();
    if (found == all.blocks.end() || found->second->announced) continue;
    Block& block = *found->second;
    fd = -1;
    if (block.resident && block.exportable) {
      const CUresult result =
          real::cuMemExportToShareableHandle(&fd, block.real, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
      if (result != CUDA_SUCCESS) fd = -1;
    }
    const bool foreign = block.owner != control::process() || block.owner_id != block.id;
    memory = {.id = block.id,
              .size = block.size,
              .address = first_mapping(all, block),
              .owner = block.owner,
              .owner_id = block.owner_id,
              .device = static_cast<std::uint32_t>(block.device),
              .flags = (fd >= 0 ? wire::kBlockHasDescriptor : 0U) | (foreign ? wire::kBlockForeign : 0U) |
                       (block.rdma ? wire::kBlockRdma : 0U) | (block.by_handle ? wire::kBlockByHandle : 0U)};
    block.announced = true;
    return true;
  }
  return false;
}

bool next_forgotten(std::uint64_t& id) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (all.forgotten.empty()) return false;
  id = all.forgotten.back();
  all.forgotten.pop_back();
  return true;
}

void announce_all() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.fresh.clear();
  for (auto& [id, block] : all.blocks) {
    block->announced = false;
    all.fresh.push_back(id);
  }
}

CUresult evict(Totals& done, std::string& why) {
  give_back_freed();  // none: since the gate was sealed nothing can have been freed
  State& all = state();
  const std::lock_guard lock(all.mutex);
  CUresult result = CUDA_SUCCESS;
  for (auto& [address, mapping] : all.mappings) {
    if (!mapping.mapped) continue;
    result = real::cuMemUnmap(address, mapping.size);
    if (result != CUDA_SUCCESS) {
      why = about(address, mapping, "cuMemUnmap", result);
      break;
    }
    mapping.mapped = false;
  }
  if (result != CUDA_SUCCESS) {
    for (auto& [address, mapping] : all.mappings) {
      if (mapping.mapped || !mapping.block->resident) continue;
      const CUresult back = map_one(address, mapping);
      if (back != CUDA_SUCCESS) why += "; and " + about(address, mapping, "mapping again", back);
    }
    return result;
  }
  for (auto& [id, block] : all.blocks) {
    if (!block->resident) continue;
    real::cuMemRelease(block->real);
    block->resident = false;
    ++done.blocks;
    done.bytes += block->size;
  }
  all.evicted = true;
  return CUDA_SUCCESS;
}

CUresult adopt(std::uint64_t id, int fd) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(id);
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  if (found != all.blocks.end() && !found->second->resident) {
    Block& block = *found->second;
    result = real::cuMemImportFromShareableHandle(&block.real, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_SUCCESS) {
      block.resident = true;
      block.exportable = false;
    }
  }
  close(fd);
  return result;
}

std::int32_t map_all(Totals& done, std::string& why) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  for (const auto& [id, block] : all.blocks) {
    if (block->resident) continue;
    why = "no descriptor came for block " + std::to_string(id) + " (" + std::to_string(block->size) + " bytes)";
    return wire::kIncomplete;
  }
  for (auto& [address, mapping] : all.mappings) {
    if (mapping.mapped) continue;
    const CUresult result = map_one(address, mapping);
    if (result != CUDA_SUCCESS) {
      why = about(address, mapping, "mapping", result);
      return result;
    }
  }
  for (const auto& [id, block] : all.blocks) {
    ++done.blocks;
    done.bytes += block->size;
  }
  all.evicted = false;
  return 0;
}

std::string describe() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  std::uint64_t bytes = 0;
  std::uint64_t kept_elsewhere = 0;
  for (const auto& [id, block] : all.blocks) {
    bytes += block->size;
    if (!block->exportable) ++kept_elsewhere;
  }
  std::string text = "\"blocks\":" + std::to_string(all.blocks.size()) + ",\"bytes\":" + std::to_string(bytes) +
                     ",\"mappings\":" + std::to_string(all.mappings.size()) +
                     ",\"not_exportable\":" + std::to_string(kept_elsewhere) +
                     ",\"evicted\":" + (all.evicted ? "true" : "false") + ",\"refusals\":[";
  bool first = true;
  for (const Refusal& refusal : all.refusals) {
    text += std::string(first ? "" : ",") + "{\"api\":\"" + refusal.api +
            "\",\"address\":" + std::to_string(refusal.address) + ",\"size\":" + std::to_string(refusal.size) + "}";
    first = false;
  }
  return text + "]";
}

}  // namespace moorage::bulk
