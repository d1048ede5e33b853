// Bulk memory comes and goes: taken from the device and brought back, addresses, contents, handles and graphs stay.
#include <sys/mman.h>

#include "job.h"

namespace {

void allocations(Job& job) {
  CUdeviceptr small = 0;
  CUdeviceptr large[3] = {};
  OK(cuMemAlloc_v2(&small, 1000));
  CHECK(last_call() == "cuMemAlloc_v2");
  for (unsigned i = 0; i < 3; ++i) {
    OK(cuMemAlloc_v2(&large[i], 3 * kMiB + 4));
    CHECK(large[i] % (2 * kMiB) == 0);
    fill(large[i], 3 * kMiB + 4, 0xAB00 + i);
  }
  fill(small, 1000, 5);
  CHECK(plain() == 1000);
  CHECK(physical() == 1000 + 3 * 4 * kMiB);
  job.wait_for_blocks(3);

  // A graph over the memory: it holds addresses.
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  OK(cuStreamCreate(&stream, 0));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  int by = 1;
  std::size_t count = 3 * kMiB / 4;
  OK(launch("add", stream, &large[0], &by, &count));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphInstantiateWithFlags(&exec, graph, 0));

  for (unsigned round = 0; round < 3; ++round) {
    job.round();
    holds(large[0], 3 * kMiB, 0xAB00 + round);
    holds(large[1], 3 * kMiB + 4, 0xAB01);
    holds(large[2], 3 * kMiB + 4, 0xAB02);
    holds(small, 1000, 5);
    OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
  }
  OK(cuMemFree_v2(large[1]));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(large[1]));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(large[2] + 4));
  OK(cuMemFree_v2(0));
  job.wait_for_blocks(2);
  job.round();
  holds(large[2], 3 * kMiB + 4, 0xAB02);
  OK(cuMemFree_v2(small));
  OK(cuMemFree_v2(large[0]));
  OK(cuMemFree_v2(large[2]));
  CHECK(physical() == 0);
  ANSWERS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&small, std::size_t{9} << 30U));
  ANSWERS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&small, SIZE_MAX - 5));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(nullptr, 4 * kMiB));
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphDestroy(graph));
  OK(cuStreamDestroy_v2(stream));
}

void pitched() {
  CUdeviceptr memory = 0;
  std::size_t pitch = 0;
  OK(cuMemAllocPitch_v2(&memory, &pitch, 1000, 10'000, 4));
  CHECK(pitch == 1024 && plain() == 0);
  fill(memory, pitch * 10'000, 3);
  OK(cuMemFree_v2(memory));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemAllocPitch_v2(&memory, &pitch, 1000, 10'000, 5));
}

void what_is_said_of_pointers() {
  CUdeviceptr memory = 0;
  OK(cuMemAlloc_v2(&memory, 3 * kMiB));
  CUdeviceptr base = 0;
  std::size_t size = 0;
  OK(cuMemGetAddressRange_v2(&base, &size, memory + 5));
  CHECK(base == memory && size == 3 * kMiB);
  OK(cuMemGetAddressRange_v2(nullptr, &size, memory + 5));
  OK(cuMemGetAddressRange_v2(&base, nullptr, memory + 5));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemGetInfo_v2(nullptr, nullptr));
  CUcontext context = nullptr;
  CUcontext current = nullptr;
  OK(cuCtxGetCurrent(&current));
  unsigned capable = 0;
  int device = -1;
  std::uint64_t types = 9;
  CUdeviceptr start = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                      CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                      CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES};
  void* data[] = {&context, &device, &capable, &start, &size, &types};
  OK(cuPointerGetAttributes(6, attributes, data, memory + 100));
  CHECK(context == current && device == 0 && capable == 1 && start == memory && size == 3 * kMiB && types == 0);
  context = nullptr;
  OK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, memory));
  CHECK(context == current);
  CUmemGenericAllocationHandle handle = 0;
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(memory)));
  OK(cuMemFree_v2(memory));
}

CUmemAllocationProp properties(CUmemAllocationHandleType type) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  wanted.requestedHandleTypes = type;
  return wanted;
}

void handles(Job& job) {
  constexpr std::size_t kSize = 4 * kMiB;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {0}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const auto wanted = properties(CU_MEM_HANDLE_TYPE_NONE);
  CUmemGenericAllocationHandle handle = 0;
  CUmemGenericAllocationHandle again = 0;
  CUdeviceptr range = 0;
  OK(cuMemCreate(&handle, kSize, &wanted, 0));
  OK(cuMemAddressReserve(&range, 4 * kSize, 0, 0, 0));
  // The same memory at two addresses, as a ring buffer has it.
  OK(cuMemMap(range, kSize, 0, handle, 0));
  OK(cuMemMap(range + kSize, kSize, 0, handle, 0));
  OK(cuMemSetAccess(range, 2 * kSize, &access, 1));
  fill(range, kSize, 77);
  holds(range + kSize, kSize, 77);
  CUmemAllocationProp told{};
  OK(cuMemGetAllocationPropertiesFromHandle(&told, handle));
  CHECK(told.requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE);
  OK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(range + 8)));
  CHECK(again == handle);
  OK(cuMemRelease(again));
  int fd = -1;
  ANSWERS(CUDA_ERROR_INVALID_VALUE,
          cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));

  job.round();
  holds(range, kSize, 77);
  fill(range + kSize, kSize, 78);
  holds(range, kSize, 78);

  // Released while mapped: lives until it is unmapped.
  OK(cuMemMap(range + 2 * kSize, kSize, 0, handle, 0));
  OK(cuMemRelease(handle));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemRelease(handle));
  job.round();
  holds(range, kSize, 78);
  OK(cuMemUnmap(range, 3 * kSize));
  CHECK(physical() == 0);
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemMap(range, kSize, 0, handle, 0));
  OK(cuMemAddressFree(range, 4 * kSize));
  job.wait_for_blocks(0);
}

void exports(Job& job) {
  constexpr std::size_t kSize = 2 * kMiB;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {0}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const auto wanted = properties(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr range = 0;
  OK(cuMemCreate(&handle, kSize, &wanted, 0));
  OK(cuMemAddressReserve(&range, 2 * kSize, 0, 0, 0));
  OK(cuMemMap(range, kSize, 0, handle, 0));
  OK(cuMemSetAccess(range, kSize, &access, 1));
  fill(range, kSize, 11);
  // Before a restore the driver exports, after it the broker does: the job sees no difference.
  for (int round = 0; round < 2; ++round) {
    int fd = -1;
    OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CUmemGenericAllocationHandle imported = 0;
    OK(cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    OK(cuMemMap(range + kSize, kSize, 0, imported, 0));
    OK(cuMemSetAccess(range + kSize, kSize, &access, 1));
    holds(range + kSize, kSize, 11);
    job.wait_for_blocks(2);
    CHECK(job.broker().status(job.process).text.find("\"refusals\":[]") != std::string::npos);
    job.round();
    fill(range, kSize, 12);
    holds(range + kSize, kSize, 12);
    fill(range, kSize, 11);
    OK(cuMemUnmap(range + kSize, kSize));
    OK(cuMemRelease(imported));
  }
  // Memory from outside of the pod is named.
  const int stranger = memfd_create("stranger", 0);
  CHECK(ftruncate(stranger, kSize) == 0);
  CUmemGenericAllocationHandle foreign = 0;
  OK(cuMemImportFromShareableHandle(&foreign, reinterpret_cast<void*>(static_cast<std::intptr_t>(stranger)),
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  CHECK(job.broker().status(job.process).text.find("cuMemImportFromShareableHandle") != std::string::npos);
  OK(cuMemRelease(foreign));
  CHECK(job.broker().status(job.process).text.find("\"refusals\":[]") != std::string::npos);
  OK(cuMemUnmap(range, kSize));
  OK(cuMemRelease(handle));
  OK(cuMemAddressFree(range, 2 * kSize));
  job.wait_for_blocks(0);
}

void peers(Job& job) {
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  OK(cuCtxGetCurrent(&first));
  OK(cuDevicePrimaryCtxRetain(&second, 1));
  CUdeviceptr before = 0;
  CUdeviceptr after = 0;
  OK(cuMemAlloc_v2(&before, 2 * kMiB));
  OK(cuCtxPushCurrent_v2(second));
  ANSWERS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemsetD32_v2(before, 1, 4));
  // Copies between devices need no peer access, as with the driver's own allocations.
  CUdeviceptr there = 0;
  OK(cuMemAlloc_v2(&there, 2 * kMiB));
  fill(there, 2 * kMiB, 3);
  OK(cuMemcpyDtoD_v2(before, there, 2 * kMiB));
  CHECK(last_call() == "cuMemcpyPeer");
  OK(cuCtxSetCurrent(first));
  holds(before, 2 * kMiB, 3);
  OK(cuCtxSetCurrent(second));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoD_v2(before + 4, there, 4 * kMiB));
  OK(cuMemFree_v2(there));
  OK(cuCtxEnablePeerAccess(first, 0));
  fill(before, 2 * kMiB, 4);
  OK(cuCtxSetCurrent(first));
  OK(cuMemAlloc_v2(&after, 2 * kMiB));
  OK(cuCtxSetCurrent(second));
  fill(after, 2 * kMiB, 5);
  job.round();
  fill(before, 2 * kMiB, 6);
  holds(after, 2 * kMiB, 5);
  OK(cuCtxDisablePeerAccess(first));
  ANSWERS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemsetD32_v2(before, 1, 4));
  OK(cuCtxPopCurrent_v2(nullptr));
  OK(cuCtxSetCurrent(first));
  holds(before, 2 * kMiB, 6);
  OK(cuMemFree_v2(before));
  OK(cuMemFree_v2(after));
}

void contexts(Job& job) {
  // What was allocated in a context goes with it.
  CUcontext own = nullptr;
  OK(cuCtxCreate_v2(&own, 0, 0));
  CUdeviceptr memory = 0;
  OK(cuMemAlloc_v2(&memory, 2 * kMiB));
  job.wait_for_blocks(1);
  OK(cuCtxDestroy_v2(own));
  job.wait_for_blocks(0);
  CHECK(physical() == 0);
}

void freed_while_capturing(Job& job) {
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  CUdeviceptr memory = 0;
  CUdeviceptr other = 0;
  OK(cuStreamCreate(&stream, 0));
  OK(cuMemAlloc_v2(&memory, 2 * kMiB));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  OK(cuMemFree_v2(memory));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(memory));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuMemAlloc_v2(&other, 2 * kMiB));
  job.wait_for_blocks(1);
  OK(cuMemFree_v2(other));
  CHECK(physical() == 0);
  OK(cuGraphDestroy(graph));
  OK(cuStreamDestroy_v2(stream));
}

void nccl_is_left_alone() {
  void* library = dlopen(NCCL, RTLD_NOW);
  CHECK(library != nullptr);
  auto* allocate = reinterpret_cast<int (*)(unsigned long long*, std::size_t)>(dlsym(library, "allocate"));
  unsigned long long memory = 0;
  OK(allocate(&memory, 4 * kMiB));
  CHECK(plain() == 4 * kMiB);
  OK(cuMemFree_v2(memory));
}

void what_cannot_be_saved_is_named(Job& job) {
  CUdeviceptr managed = 0;
  OK(cuMemAllocManaged(&managed, 5000, CU_MEM_ATTACH_GLOBAL));
  const std::string text = job.broker().status(job.process).text;
  CHECK(text.find("\"api\":\"cuMemAllocManaged\"") != std::string::npos);
  CHECK(text.find("\"size\":5000") != std::string::npos);
  OK(cuMemFree_v2(managed));
  CHECK(job.broker().status(job.process).text.find("cuMemAllocManaged") == std::string::npos);
}

}  // namespace

int main() {
  setenv("MOORAGE_GPU_CACHE", "0", 1);  // what is freed is gone: cache.cpp has the other way
  Job job;
  allocations(job);
  pitched();
  what_is_said_of_pointers();
  handles(job);
  exports(job);
  peers(job);
  contexts(job);
  freed_while_capturing(job);
  nccl_is_left_alone();
  what_cannot_be_saved_is_named(job);
  unlink(socket_path().c_str());
  std::_Exit(0);
}
