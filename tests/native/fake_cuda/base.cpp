// Start, contexts, devices, cuGetProcAddress and private tables of the fake driver.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "fake.h"

#ifndef FAKE_DEVICE_PREFIX
#error "FAKE_DEVICE_PREFIX: what the names of the device files begin with"
#endif

namespace fake {
namespace {

thread_local const char* last = "";
thread_local int as_per_thread = 0;
thread_local std::vector<Context*> stack;

std::mutex mutex;
pid_t owner = 0;
Context primary[8];
std::set<Context*> contexts;
volatile char* registers = nullptr;
std::atomic<int> private_calls{0};

// As the real driver: descriptors that stay open, and maps of the device.
void open_devices() {
  for (const char* name : {"ctl", "0", "-uvm"}) {
    const int fd = open((std::string(FAKE_DEVICE_PREFIX) + name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, 1 << 20) != 0) abort();
    void* map = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    mmap(nullptr, std::size_t{1} << 30U, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED) abort();
    registers = static_cast<volatile char*>(map);
    registers[0] = 1;
  }
}

// As some drivers: looks at the device's memory when the process ends, in a forked child as well.
struct AtExit {
  ~AtExit() {
    if (registers != nullptr) registers[1] = registers[0];
  }
} at_exit;

int private_function(int value) {
  private_calls.fetch_add(1);
  return value + 1;
}
const void* const private_table[] = {reinterpret_cast<const void*>(sizeof(void*) * 2),
                                     reinterpret_cast<const void*>(&private_function)};

// A function under another address than the symbol table's, as drivers have for some.
CUresult hidden_stream_query(CUstream stream) { return cuStreamQuery(stream); }

}  // namespace

void note(const char* name) { last = name; }
AsPerThread::AsPerThread() { ++as_per_thread; }
AsPerThread::~AsPerThread() { --as_per_thread; }

CUresult usable() { return owner != 0 && owner == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }
Context* current() { return stack.empty() ? nullptr : stack.back(); }

int device_count() {
  const char* text = std::getenv("FAKE_CUDA_DEVICES");
  return text == nullptr ? 2 : std::atoi(text);
}

}  // namespace fake

using namespace fake;

FAKE const char* fakeLastCall() { return last; }
FAKE int fakePrivateCalls() { return private_calls.load(); }
// A function newer than any header.
FAKE int cuFakeFuture(int value) {
  note("cuFakeFuture");
  return value * 2;
}

FAKE CUresult cuInit(unsigned flags) {
  note("cuInit");
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(mutex);
  if (owner == 0) {
    if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
    open_devices();
    for (int i = 0; i < 8; ++i) primary[i] = Context{i, 0, true, 0, {}};
    owner = getpid();
  }
  return usable();
}

FAKE CUresult cuDriverGetVersion(int* version) {
  note("cuDriverGetVersion");
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kVersion;
  return CUDA_SUCCESS;
}

FAKE CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : "an error";
  return CUDA_SUCCESS;
}

FAKE CUresult cuDeviceCanAccessPeer(int* may, CUdevice device, CUdevice other) {
  if (device < 0 || device >= device_count() || other < 0 || other >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *may = device == other ? 0 : 1;
  return CUDA_SUCCESS;
}

FAKE CUresult cuDeviceGetCount(int* count) {
  if (const CUresult bad = usable()) return bad;
  *count = device_count();
  return CUDA_SUCCESS;
}

FAKE CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult bad = usable()) return bad;
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKE CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (const CUresult bad = usable()) return bad;
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

FAKE CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const CUresult bad = usable()) return bad;
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(mutex);
  ++primary[device].retained;
  contexts.insert(&primary[device]);
  *context = reinterpret_cast<CUcontext>(&primary[device]);
  return CUDA_SUCCESS;
}

FAKE CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (const CUresult bad = usable()) return bad;
  {
    const std::lock_guard lock(mutex);
    if (primary[device].retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary[device].retained != 0) return CUDA_SUCCESS;
  }
  free_memory_of(&primary[device]);
  return CUDA_SUCCESS;
}

FAKE CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  if (const CUresult bad = usable()) return bad;
  free_memory_of(&primary[device]);
  return CUDA_SUCCESS;
}

FAKE CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (const CUresult bad = usable()) return bad;
  const std::lock_guard lock(mutex);
  *flags = 0;
  *active = primary[device].retained != 0;
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  note("cuCtxCreate_v2");
  if (const CUresult bad = usable()) return bad;
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  auto* made = new Context{device, flags, false, 0, {}};
  const std::lock_guard lock(mutex);
  contexts.insert(made);
  stack.push_back(made);
  *context = reinterpret_cast<CUcontext>(made);
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams*, unsigned flags, CUdevice device) {
  const CUresult result = cuCtxCreate_v2(context, flags, device);
  note("cuCtxCreate_v4");
  return result;
}

FAKE CUresult cuCtxDestroy_v2(CUcontext handle) {
  auto* context = reinterpret_cast<Context*>(handle);
  {
    const std::lock_guard lock(mutex);
    if (contexts.erase(context) == 0 || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  }
  drain_context();
  free_memory_of(context);
  if (!stack.empty() && stack.back() == context) stack.pop_back();
  return CUDA_SUCCESS;  // the object stays: handles of the dead are only compared
}

FAKE CUresult cuCtxSetCurrent(CUcontext context) {
  if (const CUresult bad = usable()) return bad;
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(reinterpret_cast<Context*>(context));
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (const CUresult bad = usable()) return bad;
  const std::lock_guard lock(mutex);
  if (!contexts.contains(reinterpret_cast<Context*>(context))) return CUDA_ERROR_INVALID_CONTEXT;
  stack.push_back(reinterpret_cast<Context*>(context));
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = reinterpret_cast<CUcontext>(stack.back());
  stack.pop_back();
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult bad = usable()) return bad;
  *context = reinterpret_cast<CUcontext>(current());
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxGetDevice(CUdevice* device) {
  if (const CUresult bad = usable()) return bad;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current()->device;
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
  if (context == nullptr) return cuCtxGetDevice(device);
  *device = reinterpret_cast<Context*>(context)->device;
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(mutex);
  return current()->peers.insert(reinterpret_cast<Context*>(peer)).second ? CUDA_SUCCESS
                                                                        : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

FAKE CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(mutex);
  return current()->peers.erase(reinterpret_cast<Context*>(peer)) == 1 ? CUDA_SUCCESS
                                                                     : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

FAKE CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult* status) {
  note("cuGetProcAddress_v2");
  if (symbol == nullptr || function == nullptr || version > kVersion + 999 || flags > 2) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *function = nullptr;
  bool known = false;
  const Row* best = nullptr;
  for (std::size_t i = 0; i < kRowCount; ++i) {
    const Row& row = kRows[i];
    if (std::strcmp(row.base, symbol) != 0) continue;
    known = true;
    if (row.since > version || (row.per_thread && (flags & 2U) == 0)) continue;
    const bool better = best == nullptr || (row.per_thread && !best->per_thread) ||
                        (row.per_thread == best->per_thread && row.since > best->since);
    if (better) best = &row;
  }
  if (best != nullptr) *function = best->function;
  if (best != nullptr && std::strcmp(symbol, "cuStreamQuery") == 0 && !best->per_thread) {
    *function = reinterpret_cast<void*>(&hidden_stream_query);
  }
  if (std::strcmp(symbol, "cuFakeFuture") == 0) *function = reinterpret_cast<void*>(&cuFakeFuture);
  if (status != nullptr) {
    *status = *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
              : known              ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                   : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return *function != nullptr || status != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

FAKE CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

FAKE CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  if (id == nullptr || static_cast<unsigned char>(id->bytes[0]) != 0xAB) return CUDA_ERROR_INVALID_VALUE;
  *table = private_table;
  return CUDA_SUCCESS;
}
