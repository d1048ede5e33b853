// ncclMemAlloc and ncclMemFree, as NCCL carries them out, but asked of the driver from here: what NCCL itself allocates
// is its own and goes with its communicators; this is the job's, and the libcuda proxy must manage it as such.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "comm.h"
#include "cuda.h"
#include "entry.h"
#include "hooks.h"
#include "real.h"

namespace moorage::nccl {
namespace {

constexpr int kUnhandledCudaError = 1;

// As cuda.h has them.
constexpr int kOnDevice = 1;
constexpr int kPinned = 1;
constexpr int kFileDescriptor = 1;
constexpr int kReadWrite = 3;
constexpr int kRecommended = 1;
constexpr int kHasMappings = 102;
constexpr int kHasDescriptors = 103;
constexpr int kHasRdma = 110;

struct Location {
  int type;
  int id;
};
struct Properties {
  int type;
  int handles;
  Location location;
  void* unused;
  unsigned char compression;
  unsigned char rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
static_assert(sizeof(Properties) == 32);
struct Access {
  Location location;
  int flags;
};

using Address = unsigned long long;
using Handle = unsigned long long;

constinit cuda::Entry<int(int*)> get_device("cuCtxGetDevice");
constinit cuda::Entry<int(int*)> count_devices("cuDeviceGetCount");
constinit cuda::Entry<int(int*, int, int)> attribute("cuDeviceGetAttribute");
constinit cuda::Entry<int(int*, int, int)> can_access("cuDeviceCanAccessPeer");
constinit cuda::Entry<int(std::size_t*, const Properties*, int)> granularity("cuMemGetAllocationGranularity");
constinit cuda::Entry<int(Handle*, std::size_t, const Properties*, unsigned long long)> create("cuMemCreate");
constinit cuda::Entry<int(Handle)> release("cuMemRelease");
constinit cuda::Entry<int(Address*, std::size_t, std::size_t, Address, unsigned long long)> reserve(
    "cuMemAddressReserve");
constinit cuda::Entry<int(Address, std::size_t)> free_range("cuMemAddressFree");
constinit cuda::Entry<int(Address, std::size_t, std::size_t, Handle, unsigned long long)> map("cuMemMap");
constinit cuda::Entry<int(Address, std::size_t)> unmap("cuMemUnmap");
constinit cuda::Entry<int(Address, std::size_t, const Access*, std::size_t)> grant("cuMemSetAccess");
constinit cuda::Entry<int(Address*, std::size_t)> allocate("cuMemAlloc_v2");
constinit cuda::Entry<int(Address)> deallocate("cuMemFree_v2");

struct Allocation {
  std::size_t mapped;  // 0: of cuMemAlloc
};
struct Table {
  std::mutex mutex;
  std::map<Address, Allocation> all;
};
Table& table() {
  static auto* const one = new Table;  // never destroyed
  return *one;
}

bool has(int what, int device) {
  auto* ask = attribute.get();
  int value = 0;
  return ask != nullptr && ask(&value, what, device) == 0 && value != 0;
}

// Whether NCCL would map memory, or take the driver's plain allocation.
bool maps(int device) {
  const char* told = std::getenv("NCCL_CUMEM_ENABLE");
  if (told != nullptr && std::strcmp(told, "0") == 0) return false;
  return create.get() != nullptr && map.get() != nullptr && grant.get() != nullptr && reserve.get() != nullptr &&
         has(kHasMappings, device) && has(kHasDescriptors, device);
}

// Everybody who may look at the device's memory may look at this. No calls at the end of a function: the libcuda proxy
// looks at where it is called from.
bool grant_all(Address at, std::size_t size, int device) {
  int count = 0;
  if (count_devices.get()(&count) != 0) return false;
  for (int other = 0; other < count; ++other) {
    int may = other == device ? 1 : 0;
    if (may == 0 && (can_access.get()(&may, other, device) != 0 || may == 0)) continue;
    const Access access{{kOnDevice, other}, kReadWrite};
    if (grant.get()(at, size, &access, 1) != 0) return false;
  }
  return true;
}

Address mapped(std::size_t& size, int device) {
  Properties wanted{};
  wanted.type = kPinned;
  wanted.handles = kFileDescriptor;
  wanted.location = {kOnDevice, device};
  wanted.rdma = has(kHasRdma, device) ? 1 : 0;
  std::size_t unit = 0;
  if (granularity.get()(&unit, &wanted, kRecommended) != 0 || unit == 0 || size > SIZE_MAX - unit) return 0;
  size = (size + unit - 1) / unit * unit;
  Handle handle = 0;
  Address at = 0;
  if (create.get()(&handle, size, &wanted, 0) != 0) return 0;
  if (reserve.get()(&at, size, unit, 0, 0) == 0) {
    if (map.get()(at, size, 0, handle, 0) == 0) {
      if (grant_all(at, size, device)) {
        release.get()(handle);  // the mapping keeps it
        return at;
      }
      unmap.get()(at, size);
    }
    free_range.get()(at, size);
  }
  release.get()(handle);
  return 0;
}

}  // namespace

namespace hook {

int ncclMemAlloc(void* out, std::size_t size) {
  auto* device_of = get_device.get();
  int device = -1;
  // Without a driver, or a context, it is NCCL that finds out what to do; with no size it says what is wrong.
  if (out == nullptr || size == 0 || device_of == nullptr || allocate.get() == nullptr || device_of(&device) != 0) {
    return real::ncclMemAlloc(out, size);
  }
  Address at = 0;
  std::size_t whole = size;
  const bool mapping = maps(device);
  if (mapping) {
    at = mapped(whole, device);
  } else if (allocate.get()(&at, size) != 0) {
    at = 0;
  }
  if (at == 0) return kUnhandledCudaError;
  {
    const std::lock_guard lock(table().mutex);
    table().all[at] = {mapping ? whole : 0};
  }
  *static_cast<void**>(out) = reinterpret_cast<void*>(at);
  return kSuccess;
}

int ncclMemFree(void* memory) {
  const auto at = reinterpret_cast<Address>(memory);
  Allocation known{};
  {
    const std::lock_guard lock(table().mutex);
    const auto found = table().all.find(at);
    if (found == table().all.end()) return real::ncclMemFree(memory);
    known = found->second;
    table().all.erase(found);
  }
  int bad = known.mapped == 0 ? deallocate.get()(at) : unmap.get()(at, known.mapped);
  if (known.mapped != 0 && bad == 0) bad = free_range.get()(at, known.mapped);
  return bad == 0 ? kSuccess : kUnhandledCudaError;
}

}  // namespace hook
}  // namespace moorage::nccl
