// The messages between a process of the job and the GPU broker: packets of a SOCK_SEQPACKET socket, each a header and
// one fixed structure, little-endian, with at most one descriptor. docs/intercept.md describes them for the other side.
#pragma once

#include <cstdint>

namespace moorage::wire {

inline constexpr std::uint32_t kMagic = 0x4350474D;  // "MGPC"
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::uint32_t kPacketMax = 64 * 1024;

enum class Type : std::uint16_t {
  // process to broker
  Hello = 1,
  Memory = 2,    // here is a block, and its descriptor if there is one
  Forget = 3,    // a block was freed
  Result = 4,    // the answer to a command, with its request number
  Identify = 5,  // a request: which block is the descriptor that I send?
  Fetch = 6,     // a request: send me the descriptor of a block
  Exported = 7,  // a request: remember that this descriptor, too, is that block
  // broker to process
  Welcome = 16,
  Quiesce = 17,
  Evict = 18,
  Adopt = 19,   // with a descriptor
  Map = 20,
  Resume = 21,
  Status = 22,
  Answer = 23,  // to a request of the process
};

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  Type type;
  std::uint64_t request;  // chosen by whoever asks; the answer repeats it
  std::uint32_t length;   // of what follows the header
  std::uint32_t reserved;
};
static_assert(sizeof(Header) == 24);

struct Hello {
  std::uint64_t process;      // drawn at random when CUDA was started, survives a checkpoint
  std::uint64_t incarnation;  // as the last Welcome said it; 0 before the first
  std::uint32_t pid;          // in the pod's own namespace
  std::uint32_t level;        // of the gate: 0 open, 3 sealed
  std::uint32_t evicted;      // 1: waiting for Adopt and Map
  std::uint32_t blocks;
  std::uint64_t bytes;
  char name[16];
};
static_assert(sizeof(Hello) == 56);

enum : std::uint32_t {
  kBlockHasDescriptor = 1,
  kBlockForeign = 2,   // another process's (or an imported) block: owner and owner_id say which
  kBlockRdma = 4,      // made capable of GPUDirect RDMA
  kBlockByHandle = 8,  // from cuMemCreate, not cuMemAlloc
};

struct Memory {
  std::uint64_t id;  // within this process, never used again
  std::uint64_t size;
  std::uint64_t address;  // of the first mapping; 0: not mapped
  std::uint64_t owner;    // process of the block's maker
  std::uint64_t owner_id;
  std::uint32_t device;
  std::uint32_t flags;
};
static_assert(sizeof(Memory) == 48);

struct Block {  // Forget, Adopt, Fetch, Exported
  std::uint64_t process;
  std::uint64_t id;
};

struct Found {  // payload of Answer
  std::int32_t status;  // 0: found
  std::uint32_t device;
  std::uint64_t process;
  std::uint64_t id;
  std::uint64_t size;
};
static_assert(sizeof(Found) == 32);

struct Outcome {  // payload of Result; text follows, not terminated
  std::int32_t status;  // 0: done; else a CUresult, or one of Failure
  std::uint32_t count;
  std::uint64_t bytes;
};
static_assert(sizeof(Outcome) == 16);

enum Failure : std::int32_t {
  kDeadline = -1,    // the text says who was in the way
  kWrongState = -2,  // the command does not fit what went before
  kMalformed = -3,
  kIncomplete = -4,  // Map, but blocks are missing: the text says which
};

struct Welcome {
  std::uint64_t incarnation;
};
struct Quiesce {
  std::uint64_t timeout_ms;
};

}  // namespace moorage::wire
