// Memory of the fake driver. Physical memory is a file in memory; an address range is reserved without access; mapping
// puts the file there. Kernels run in this process, so device addresses are addresses.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "fake.h"

namespace fake {
namespace {

struct Physical {
  int fd = -1;
  std::size_t size = 0;
  CUmemAllocationProp properties{};
  bool imported = false;
  ~Physical() {
    if (fd >= 0) close(fd);
  }
};
using Shared = std::shared_ptr<Physical>;

struct Handle {
  Shared memory;
  unsigned references = 1;
};

struct Mapping {
  std::size_t size = 0;
  Shared memory;
  std::set<int> devices;  // that may use it
};

struct Plain {  // cuMemAlloc
  std::size_t size = 0;
  Context* owner = nullptr;
};

std::mutex& mutex = *new std::mutex;
auto& handles = *new std::map<CUmemGenericAllocationHandle, Handle>;
auto& reservations = *new std::map<std::uintptr_t, std::size_t>;
auto& mappings = *new std::map<std::uintptr_t, Mapping>;
auto& plain = *new std::map<std::uintptr_t, Plain>;
CUmemGenericAllocationHandle next_handle = 0x1000;
std::size_t in_plain = 0;
std::atomic<int> unmaps_while_busy{0};

template <typename Map>
auto covering(Map& map, std::uintptr_t address) {
  auto found = map.upper_bound(address);
  if (found == map.begin()) return map.end();
  --found;
  return address < found->first + found->second.size ? found : map.end();
}

// Whoever imports memory learns on which device it is.
const std::string kFile = "fake-device-memory-";
int device_of(int fd) {
  char target[64] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), target, sizeof target - 1) < 0) return 0;
  const char* name = std::strstr(target, kFile.c_str());
  return name == nullptr ? 0 : std::atoi(name + kFile.size());
}

std::size_t physical_bytes() {
  std::set<Physical*> distinct;
  for (auto& [id, handle] : handles) distinct.insert(handle.memory.get());
  for (auto& [address, mapping] : mappings) distinct.insert(mapping.memory.get());
  std::size_t bytes = in_plain;
  for (const Physical* one : distinct) bytes += one->size;
  return bytes;
}

void make_inaccessible(std::uintptr_t address, std::size_t size) {
  mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
       0);
}

}  // namespace

void* translate(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

bool accessible(std::uintptr_t address, std::size_t size, int device) {
  const std::lock_guard lock(mutex);
  if (const auto found = covering(plain, address); found != plain.end()) {
    if (address + size > found->first + found->second.size) return false;
    Context* here = current();
    return found->second.owner->device == device || (here != nullptr && here->peers.contains(found->second.owner));
  }
  if (covering(mappings, address) != mappings.end()) {
    for (std::uintptr_t at = address; at < address + size;) {
      const auto found = covering(mappings, at);
      if (found == mappings.end() || !found->second.devices.contains(device)) return false;
      at = found->first + found->second.size;
    }
    return true;
  }
  auto reserved = reservations.upper_bound(address);
  if (reserved != reservations.begin()) {
    --reserved;
    if (address < reserved->first + reserved->second) return false;
  }
  return true;  // host memory
}

void free_memory_of(Context* context) {
  const std::lock_guard lock(mutex);
  for (auto at = plain.begin(); at != plain.end();) {
    if (at->second.owner != context) {
      ++at;
      continue;
    }
    munmap(reinterpret_cast<void*>(at->first), at->second.size);
    in_plain -= at->second.size;
    at = plain.erase(at);
  }
}

}  // namespace fake

using namespace fake;

FAKE int fakeUnmapsWhileBusy() { return unmaps_while_busy.load(); }
FAKE std::size_t fakePhysicalBytes() {
  const std::lock_guard lock(fake::mutex);
  return physical_bytes();
}
FAKE std::size_t fakePlainBytes() {
  const std::lock_guard lock(fake::mutex);
  return in_plain;
}

FAKE CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
  note("cuMemAlloc_v2");
  if (const CUresult bad = usable()) return bad;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (pointer == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(fake::mutex);
  if (physical_bytes() + size > kTotal) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  plain[reinterpret_cast<std::uintptr_t>(memory)] = {size, current()};
  in_plain += size;
  *pointer = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemAllocPitch_v2(CUdeviceptr* pointer, size_t* pitch, size_t width, size_t height, unsigned element) {
  note("cuMemAllocPitch_v2");
  if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
  *pitch = (width + 511) / 512 * 512;
  return cuMemAlloc_v2(pointer, *pitch * height);
}

FAKE CUresult cuMemFree_v2(CUdeviceptr pointer) {
  note("cuMemFree_v2");
  if (const CUresult bad = usable()) return bad;
  if (pointer == 0) return CUDA_SUCCESS;
  drain_context();
  const std::lock_guard lock(fake::mutex);
  const auto found = plain.find(pointer);
  if (found == plain.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(pointer), found->second.size);
  in_plain -= found->second.size;
  plain.erase(found);
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemAllocManaged(CUdeviceptr* pointer, size_t size, unsigned) {
  const CUresult result = cuMemAlloc_v2(pointer, size);
  note("cuMemAllocManaged");
  return result;
}

FAKE CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  note("cuMemGetInfo_v2");
  if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(fake::mutex);
  *free = kTotal - physical_bytes();
  *total = kTotal;
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  note("cuMemGetAddressRange_v2");
  const std::lock_guard lock(fake::mutex);
  if (const auto found = covering(plain, address); found != plain.end()) {
    if (base != nullptr) *base = found->first;
    if (size != nullptr) *size = found->second.size;
    return CUDA_SUCCESS;
  }
  if (const auto found = covering(mappings, address); found != mappings.end()) {
    if (base != nullptr) *base = found->first;
    if (size != nullptr) *size = found->second.size;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

FAKE CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  note("cuPointerGetAttribute");
  const std::lock_guard lock(fake::mutex);
  const auto own = covering(plain, address);
  const auto mapped = covering(mappings, address);
  if (own == plain.end() && mapped == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  const bool is_plain = own != plain.end();
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) = is_plain ? reinterpret_cast<CUcontext>(own->second.owner) : nullptr;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(data) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = is_plain ? own->second.owner->device : mapped->second.memory->properties.location.id;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<unsigned*>(data) = is_plain ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(data) = is_plain ? own->first : mapped->first;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<std::size_t*>(data) = is_plain ? own->second.size : mapped->second.size;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *static_cast<std::uint64_t*>(data) = is_plain ? 0 : 1;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

FAKE CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data,
                                     CUdeviceptr address) {
  for (unsigned i = 0; i < count; ++i) {
    if (const CUresult bad = cuPointerGetAttribute(data[i], attributes[i], address)) return bad;
  }
  note("cuPointerGetAttributes");
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*,
                                            CUmemAllocationGranularity_flags) {
  *size = kGranularity;
  return usable();
}

FAKE CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                          unsigned long long flags) {
  note("cuMemCreate");
  if (const CUresult bad = usable()) return bad;
  if (size == 0 || size % kGranularity != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (properties->location.id < 0 || properties->location.id >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(fake::mutex);
  if (physical_bytes() + size > kTotal) return CUDA_ERROR_OUT_OF_MEMORY;
  auto memory = std::make_shared<Physical>();
  const std::string name = kFile + std::to_string(properties->location.id);
  memory->fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  memory->size = size;
  memory->properties = *properties;
  if (memory->fd < 0 || ftruncate(memory->fd, static_cast<off_t>(size)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next_handle++;
  handles[*handle] = {std::move(memory), 1};
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  note("cuMemRelease");
  const std::lock_guard lock(fake::mutex);
  const auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.references == 0) handles.erase(found);
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  note("cuMemAddressReserve");
  if (const CUresult bad = usable()) return bad;
  if (size == 0 || size % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t room = size + kGranularity;
  void* raw = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (aligned > begin) munmap(raw, aligned - begin);
  if (aligned + size < begin + room) munmap(reinterpret_cast<void*>(aligned + size), begin + room - aligned - size);
  const std::lock_guard lock(fake::mutex);
  reservations[aligned] = size;
  *address = aligned;
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  note("cuMemAddressFree");
  const std::lock_guard lock(fake::mutex);
  const auto found = reservations.find(address);
  if (found == reservations.end() || found->second != size) return CUDA_ERROR_INVALID_VALUE;
  const auto mapped = mappings.lower_bound(address);
  if (mapped != mappings.end() && mapped->first < address + size) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), size);
  reservations.erase(found);
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                       unsigned long long flags) {
  note("cuMemMap");
  const std::lock_guard lock(fake::mutex);
  const auto found = handles.find(handle);
  if (found == handles.end() || flags != 0 || offset + size > found->second.memory->size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto reserved = reservations.upper_bound(address);
  if (reserved == reservations.begin()) return CUDA_ERROR_INVALID_VALUE;
  --reserved;
  if (address + size > reserved->first + reserved->second) return CUDA_ERROR_INVALID_VALUE;
  const auto next = mappings.lower_bound(address);
  if ((next != mappings.end() && next->first < address + size) || covering(mappings, address) != mappings.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
           found->second.memory->fd, static_cast<off_t>(offset)) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mappings[address] = {size, found->second.memory, {}};
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  note("cuMemUnmap");
  if (any_busy()) unmaps_while_busy.fetch_add(1);
  const std::lock_guard lock(fake::mutex);
  for (std::uintptr_t at = address; at < address + size;) {
    const auto found = mappings.find(at);
    if (found == mappings.end() || at + found->second.size > address + size) return CUDA_ERROR_INVALID_VALUE;
    at += found->second.size;
  }
  make_inaccessible(address, size);
  mappings.erase(mappings.lower_bound(address), mappings.lower_bound(address + size));
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
  note("cuMemSetAccess");
  const std::lock_guard lock(fake::mutex);
  for (std::uintptr_t at = address; at < address + size;) {
    const auto found = mappings.find(at);
    if (found == mappings.end() || at + found->second.size > address + size) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < count; ++i) {
      if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
        found->second.devices.erase(access[i].location.id);
      } else {
        found->second.devices.insert(access[i].location.id);
      }
    }
    mprotect(reinterpret_cast<void*>(at), found->second.size,
             found->second.devices.empty() ? PROT_NONE : PROT_READ | PROT_WRITE);
    at += found->second.size;
  }
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  const std::lock_guard lock(fake::mutex);
  const auto found = covering(mappings, address);
  if (found == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  *flags = found->second.devices.contains(location->id) ? 3 : 0;
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                           CUmemAllocationHandleType type, unsigned long long) {
  note("cuMemExportToShareableHandle");
  const std::lock_guard lock(fake::mutex);
  const auto found = handles.find(handle);
  if (found == handles.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  // As seen with the real driver: what was imported cannot be exported again.
  const Physical& memory = *found->second.memory;
  if (memory.imported || memory.properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *static_cast<int*>(out) = fcntl(memory.fd, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                             CUmemAllocationHandleType type) {
  note("cuMemImportFromShareableHandle");
  if (const CUresult bad = usable()) return bad;
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor));
  struct stat about {};
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto memory = std::make_shared<Physical>();
  memory->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  memory->size = static_cast<std::size_t>(about.st_size);
  memory->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory->properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory->properties.location.id = device_of(memory->fd);
  memory->properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  memory->imported = true;
  const std::lock_guard lock(fake::mutex);
  *handle = next_handle++;
  handles[*handle] = {std::move(memory), 1};
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  note("cuMemRetainAllocationHandle");
  const std::lock_guard lock(fake::mutex);
  const auto found = covering(mappings, reinterpret_cast<std::uintptr_t>(address));
  if (found == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  for (auto& [id, entry] : handles) {
    if (entry.memory != found->second.memory) continue;
    ++entry.references;
    *handle = id;
    return CUDA_SUCCESS;
  }
  *handle = next_handle++;
  handles[*handle] = {found->second.memory, 1};
  return CUDA_SUCCESS;
}

FAKE CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                     CUmemGenericAllocationHandle handle) {
  note("cuMemGetAllocationPropertiesFromHandle");
  const std::lock_guard lock(fake::mutex);
  const auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *properties = found->second.memory->properties;
  return CUDA_SUCCESS;
}
