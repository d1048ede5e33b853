// Device memory that the proxy manages: blocks of physical memory whose descriptors the broker keeps, and where they
// are mapped. Addresses never change; physical memory can go (evict) and come back (adopt, map).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_api.h"
#include "wire.h"

namespace moorage::bulk {

inline constexpr std::size_t kBulkMin = std::size_t{2} << 20U;

struct Block {
  std::uint64_t id = 0;
  std::size_t size = 0;
  int device = 0;
  CUmemGenericAllocationHandle real = 0;  // one reference of our own, while resident
  bool resident = true;
  bool exportable = true;  // made in this process since the last restore; an imported handle cannot be exported
  bool announced = false;
  bool rdma = false;
  bool by_handle = false;                // cuMemCreate
  bool shared = false;                   // another process may know it by its number (legacy IPC)
  unsigned asked_handles = 0;            // the handle types that the job asked for
  unsigned references = 0;               // that the job holds
  unsigned mappings = 0;
  std::uint64_t owner = 0;  // process and id of the maker; our own but for what was imported
  std::uint64_t owner_id = 0;
};

struct Mapping {
  std::size_t size = 0;
  std::size_t offset = 0;
  std::shared_ptr<Block> block;
  std::vector<CUmemAccessDesc> access;
  bool mapped = true;
  // The rest only for what cuMemAlloc or cuIpcOpenMemHandle answered; then the address range is ours, too.
  bool own = false;
  std::size_t asked = 0;  // bytes that the job asked for
  CUcontext context = nullptr;
  unsigned ipc_opens = 0;  // times opened; 0: it was allocated here
};

// Something that a checkpoint cannot hold.
struct Refusal {
  std::string api;
  std::uint64_t address;
  std::uint64_t size;
};

// What the job freed and the next allocation of its size gets, where it is: see cache.cpp.
struct Freed {
  CUdeviceptr address = 0;
  Mapping mapping;
  std::uint64_t turn = 0;  // the smaller the older
};
inline constexpr int kDevices = 64;

struct State {
  std::mutex mutex;
  std::map<CUdeviceptr, Mapping> mappings;  // by address
  std::unordered_map<std::uint64_t, std::shared_ptr<Block>> blocks;
  std::vector<std::uint64_t> fresh;     // to announce
  std::vector<std::uint64_t> forgotten;  // announced, and gone
  std::vector<CUdeviceptr> zombies;      // freed by the job while a stream capture forbade to wait
  std::vector<std::pair<int, CUcontext>> peers;  // device .first may use what belongs to .second
  std::vector<Refusal> refusals;
  // By size, the oldest first; in none of the tables above but `blocks`.
  std::map<std::size_t, std::deque<Freed>> freed;
  std::array<std::size_t, kDevices> freed_bytes{};  // of it, by device
  std::uint64_t freed_turn = 0;
  std::int64_t last_forgotten_ns = 0;  // when the last announced block was given back
  std::uint64_t next = 1;
  bool evicted = false;
};
// Never destroyed: threads may call while the process ends.
State& state();

// ---- for hooks. With the lock held unless said otherwise

// The job's handle for a block, told apart from the driver's by its upper bits.
CUmemGenericAllocationHandle handle_of(const Block& block);
std::shared_ptr<Block> block_of(State& all, CUmemGenericAllocationHandle handle);
std::map<CUdeviceptr, Mapping>::iterator covering(State& all, CUdeviceptr address);
std::shared_ptr<Block> add_block(State& all, CUmemGenericAllocationHandle real, std::size_t size, int device);
void drop_if_unused(State& all, const std::shared_ptr<Block>& block);
void refuse(State& all, const char* api, std::uint64_t address, std::uint64_t size);
void settle(State& all, const char* api, std::uint64_t address);

// Who may use what belongs to a context on `device`: that device, and those with peer access to the context. Without
// the lock.
std::vector<CUmemAccessDesc> access_from(CUcontext context, int device);
// The device, as this process counts them, on which imported memory lies: its maker may count otherwise.
int located(CUmemGenericAllocationHandle real, int otherwise);

// Take an address range, map the block there and give `device` and its peers access. Without the lock; enters nothing.
CUresult map_somewhere(const Block& block, CUdeviceptr* address, std::vector<CUmemAccessDesc>& access);
// Unmap and free a range that is ours. Without the lock; the mapping is out of the table already.
void unmap_own(CUdeviceptr address, const Mapping& mapping);
// Wait for the work of a context. Without the lock.
CUresult wait_for(CUcontext context);
// Free what could not be freed while a stream was captured. Without the lock.
void bury();

// ---- freed memory that is kept (cache.cpp). All without the lock

// True: it is kept, and `mapping` is empty. Nothing on the device may use it any more.
bool keep_freed(CUdeviceptr address, Mapping& mapping);
// A kept one that is as good as new: size, device, context and access are as wanted. 0: there is none.
CUdeviceptr take_freed(std::size_t whole, std::size_t asked, int device, CUcontext context,
                       const std::vector<CUmemAccessDesc>& access);
// Give all of it back to the driver. False: there was none.
bool give_back_freed();
// What belongs to this context, or all of it (null), out of the table: the caller's to unmap. With the lock held.
std::vector<Freed> remove_freed(State& all, CUcontext context);
std::size_t freed_bytes(int device);
// Memory that was given back is the driver's again only when broker and keeper have closed their descriptors. Wait for
// that, longer with each turn. False: nothing was given back lately.
bool await_given_back(unsigned turn);

// Ask the driver for memory; when it has too little, again without what is kept or still on its way back.
template <typename Call>
CUresult without_freed(Call call) {
  CUresult result = call();
  if (result == CUDA_ERROR_OUT_OF_MEMORY && give_back_freed()) result = call();
  constexpr unsigned kTurns = 6;
  for (unsigned turn = 0; turn < kTurns && result == CUDA_ERROR_OUT_OF_MEMORY && await_given_back(turn); ++turn) {
    result = call();
  }
  return result;
}

bool manages(std::size_t size);
std::size_t granularity(int device);
std::size_t rounded(std::size_t size, int device);
// Does this device have what bulk memory needs? Remembered.
bool supported(int device);
bool rdma_supported(int device);

// ---- for others

// A context is gone: so is what was allocated in it.
void context_ended(CUcontext context);

struct Totals {
  std::uint32_t blocks = 0;
  std::uint64_t bytes = 0;
  bool evicted = false;
};
Totals totals();

// What the broker is to be told next. `fd` is the receiver's, or -1. False: nothing more.
bool next_fresh(wire::Memory& memory, int& fd);
bool next_forgotten(std::uint64_t& id);
// A new connection: everything is to be told again.
void announce_all();

// For the control thread, with the gate sealed. `why` is set on failure, and nothing has changed then (evict).
CUresult evict(Totals& done, std::string& why);
CUresult adopt(std::uint64_t id, int fd);  // takes the descriptor
// Map all that is adopted. kIncomplete, and which, when a block is missing.
std::int32_t map_all(Totals& done, std::string& why);

std::string describe();  // for Status: members of a JSON object

}  // namespace moorage::bulk
