// Freed memory that is kept. Making a block costs the driver more than cuMemAlloc does (memory, a range, a mapping, access,
// and the broker's descriptor): a job that allocates and frees the same sizes over and over gets the same block again.
//
// What is kept counts as free (cuMemGetInfo), goes back when the driver has too little memory, when its context ends, and
// before a checkpoint. MOORAGE_GPU_CACHE says how many MiB each device may keep; 0: nothing.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>

#include "bulk.h"
#include "control.h"
#include "gate.h"
#include "hooks.h"
#include "real.h"

namespace moorage::bulk {
namespace {

constexpr std::size_t kShare = 32;  // of the device's memory

std::size_t most(int device) {
  static std::atomic<std::size_t> known[kDevices];  // plus one
  std::atomic<std::size_t>& slot = known[static_cast<std::size_t>(device) % kDevices];
  std::size_t bytes = slot.load(std::memory_order_relaxed);
  if (bytes != 0) return bytes - 1;
  const char* wanted = std::getenv("MOORAGE_GPU_CACHE");
  std::size_t total = 0;
  if (wanted != nullptr && *wanted != '\0') {
    bytes = std::strtoull(wanted, nullptr, 10) << 20U;
  } else if (real::cuDeviceTotalMem_v2(&total, device) == CUDA_SUCCESS) {
    bytes = total / kShare;
  }
  slot.store(bytes + 1, std::memory_order_relaxed);
  return bytes;
}

bool same(const std::vector<CUmemAccessDesc>& one, const std::vector<CUmemAccessDesc>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(), [](const auto& a, const auto& b) {
    return a.location.type == b.location.type && a.location.id == b.location.id && a.flags == b.flags;
  });
}

std::size_t& bytes_of(State& all, int device) {
  return all.freed_bytes[static_cast<std::size_t>(device) % kDevices];
}

// Out of its queue, and uncounted. The queue may be empty afterwards.
Freed removed(State& all, std::deque<Freed>& queue, std::deque<Freed>::iterator at) {
  Freed one = std::move(*at);
  queue.erase(at);
  bytes_of(all, one.mapping.block->device) -= one.mapping.size;
  return one;
}

// The oldest of a device. False: there is none.
bool remove_oldest(State& all, int device, std::vector<Freed>& gone) {
  auto oldest = all.freed.end();
  std::deque<Freed>::iterator found;
  for (auto queue = all.freed.begin(); queue != all.freed.end(); ++queue) {
    const auto first = std::find_if(queue->second.begin(), queue->second.end(),
                                    [&](const Freed& one) { return one.mapping.block->device == device; });
    if (first == queue->second.end() || (oldest != all.freed.end() && found->turn < first->turn)) continue;
    oldest = queue;
    found = first;
  }
  if (oldest == all.freed.end()) return false;
  gone.push_back(removed(all, oldest->second, found));
  if (oldest->second.empty()) all.freed.erase(oldest);
  return true;
}

void give_back(std::vector<Freed>& gone) {
  for (const Freed& one : gone) unmap_own(one.address, one.mapping);
}

}  // namespace

bool keep_freed(CUdeviceptr address, Mapping& mapping) {
  const int device = mapping.block->device;
  const std::size_t limit = most(device);
  // An imported block is another process's, and one that another process can name must not become another allocation.
  if (mapping.size > limit || mapping.ipc_opens != 0 || !mapping.mapped) return false;
  std::vector<Freed> gone;
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    if (mapping.block->shared || mapping.block->references != 0) return false;
    while (bytes_of(all, device) + mapping.size > limit && remove_oldest(all, device, gone)) {
    }
    bytes_of(all, device) += mapping.size;
    all.freed[mapping.size].push_back({address, std::move(mapping), ++all.freed_turn});
  }
  give_back(gone);
  return true;
}

CUdeviceptr take_freed(std::size_t whole, std::size_t asked, int device, CUcontext context,
                       const std::vector<CUmemAccessDesc>& access) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto queue = all.freed.find(whole);
  if (queue == all.freed.end()) return 0;
  const auto found = std::find_if(queue->second.rbegin(), queue->second.rend(), [&](const Freed& one) {
    return one.mapping.block->device == device && one.mapping.context == context && same(one.mapping.access, access);
  });
  if (found == queue->second.rend()) return 0;
  Freed one = removed(all, queue->second, std::next(found).base());
  if (queue->second.empty()) all.freed.erase(queue);
  one.mapping.asked = asked;
  all.mappings[one.address] = std::move(one.mapping);
  return one.address;
}

bool give_back_freed() {
  std::vector<Freed> gone;
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    gone = remove_freed(all, nullptr);
  }
  give_back(gone);
  return !gone.empty();
}

bool await_given_back(unsigned turn) {
  constexpr std::int64_t kLately = 1'000'000'000;
  if (!control::connected()) return false;
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    if (all.last_forgotten_ns == 0 || gate::boottime_ns() - all.last_forgotten_ns > kLately) return false;
  }
  control::tell_now();
  // Its answer says that the broker has closed its own; the keeper follows.
  const control::Reply reply = control::ask(wire::Type::Fetch, control::process(), 0, -1);
  if (reply.descriptor >= 0) close(reply.descriptor);
  usleep(1000U << turn);
  return true;
}

std::size_t freed_bytes(int device) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  return bytes_of(all, device);
}

std::vector<Freed> remove_freed(State& all, CUcontext context) {
  std::vector<Freed> gone;
  for (auto queue = all.freed.begin(); queue != all.freed.end();) {
    for (auto at = queue->second.begin(); at != queue->second.end();) {
      if (context != nullptr && at->mapping.context != context) {
        ++at;
        continue;
      }
      const auto place = at - queue->second.begin();
      gone.push_back(removed(all, queue->second, at));
      at = queue->second.begin() + place;
    }
    queue = queue->second.empty() ? all.freed.erase(queue) : std::next(queue);
  }
  return gone;
}

}  // namespace moorage::bulk

namespace moorage::hook {

using namespace bulk;

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  const CUresult result = real::cuMemGetInfo_v2(free, total);
  CUdevice device = -1;
  if (result == CUDA_SUCCESS && free != nullptr && control::active() &&
      real::cuCtxGetDevice(&device) == CUDA_SUCCESS) {
    *free += freed_bytes(device);
  }
  return result;
}

CUresult cuMemAllocAsync(CUdeviceptr* pointer, size_t size, CUstream stream) {
  return without_freed([&] { return real::cuMemAllocAsync(pointer, size, stream); });
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr* pointer, size_t size, CUstream stream) {
  return without_freed([&] { return real::cuMemAllocAsync_ptsz(pointer, size, stream); });
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* pointer, size_t size, CUmemoryPool pool, CUstream stream) {
  return without_freed([&] { return real::cuMemAllocFromPoolAsync(pointer, size, pool, stream); });
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* pointer, size_t size, CUmemoryPool pool, CUstream stream) {
  return without_freed([&] { return real::cuMemAllocFromPoolAsync_ptsz(pointer, size, pool, stream); });
}

}  // namespace moorage::hook
