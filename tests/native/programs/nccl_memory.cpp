// Memory from ncclMemAlloc is the job's: the libnccl proxy asks for it, and the libcuda proxy takes it from the device and
// brings it back. Both proxies as in a pod; NCCL and the driver are fakes.
#include <dlfcn.h>

#include "job.h"

namespace {

constexpr std::size_t kAsked = 3 * kMiB;

int (*mem_alloc)(void**, std::size_t) = nullptr;
int (*mem_free)(void*) = nullptr;

void open_proxy() {
  setenv("MOORAGE_REAL_LIBNCCL", FAKE_NCCL, 1);
  setenv("MOORAGE_NCCL_SOCKET", "/nonexistent", 1);
  void* proxy = dlopen(NCCL_PROXY, RTLD_NOW);
  CHECK(proxy != nullptr);
  mem_alloc = reinterpret_cast<int (*)(void**, std::size_t)>(dlsym(proxy, "ncclMemAlloc"));
  mem_free = reinterpret_cast<int (*)(void*)>(dlsym(proxy, "pncclMemFree"));
  CHECK(mem_alloc != nullptr && mem_free != nullptr);
}

void goes_and_comes(Job& job, bool mapped) {
  void* memory = nullptr;
  CHECK(mem_alloc(&memory, kAsked) == 0);
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  CHECK(physical() == 4 * kMiB && plain() == 0);
  fill(address, kAsked, 21);
  job.wait_for_blocks(1);
  const auto kept = job.broker().kept();
  CHECK(((kept.begin()->second.about.flags & wire::kBlockByHandle) != 0) == mapped);
  for (unsigned value = 21; value < 23; ++value) {
    CHECK(job.broker().status(job.process).text.find("\"refusals\":[]") != std::string::npos);
    job.round();
    holds(address, kAsked, value);
    fill(address, kAsked, value + 1);
    if (!mapped) continue;
    // As NCCL registers it with another rank: before a restore and after.
    CUmemGenericAllocationHandle handle = 0;
    int fd = -1;
    OK(cuMemRetainAllocationHandle(&handle, memory));
    OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fd);
    OK(cuMemRelease(handle));
  }
  CHECK(mem_free(memory) == 0);
  job.wait_for_blocks(0);
}

void other_devices() {
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  OK(cuCtxGetCurrent(&first));
  OK(cuDevicePrimaryCtxRetain(&second, 1));
  void* memory = nullptr;
  CHECK(mem_alloc(&memory, kAsked) == 0);
  int may = 0;
  OK(cuDeviceCanAccessPeer(&may, 1, 0));
  OK(cuCtxSetCurrent(second));
  if (may != 0) fill(reinterpret_cast<CUdeviceptr>(memory), kAsked, 4);
  OK(cuCtxSetCurrent(first));
  CHECK(mem_free(memory) == 0);
  CHECK(mem_alloc(&memory, std::size_t{1} << 50U) == 1);
  CHECK(physical() == 0);
}

}  // namespace

int main() {
  Job job;
  open_proxy();
  goes_and_comes(job, true);
  other_devices();
  setenv("NCCL_CUMEM_ENABLE", "0", 1);
  setenv("MOORAGE_GPU_CACHE", "0", 1);
  goes_and_comes(job, false);
  unlink(socket_path().c_str());
  std::_Exit(0);
}
