// What the libcuda proxy does for a libnccl: memory from ncclMemAlloc is the job's, taken from the device and brought back;
// a stream that ends leaves an event behind. Both proxies as in a pod; NCCL and the driver are fakes.
#include <dlfcn.h>

#include <atomic>
#include <thread>

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

std::atomic<void*> left{nullptr};

void stream_ends(void* stream, void* (*mark)(void*)) { left = mark(stream); }

void streams_that_end() {
  using Tell = void (*)(void (*)(void*, void* (*)(void*)));
  const auto tell = reinterpret_cast<Tell>(dlsym(RTLD_DEFAULT, "moorage_tell_stream_ends"));
  const auto captures = reinterpret_cast<std::size_t (*)()>(dlsym(RTLD_DEFAULT, "moorage_captures_running"));
  CHECK(tell != nullptr && captures != nullptr);
  tell(stream_ends);
  tell(stream_ends);
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  std::atomic<int> flag{0};
  std::atomic<int>* address = &flag;
  OK(cuStreamCreate(&stream, 0));
  OK(launch("wait", stream, &address));
  // The driver lets a stream go while it has work; the fake waits for it.
  std::thread ends([&] {
    CUcontext context = nullptr;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamDestroy_v2(stream));
  });
  while (left == nullptr) std::this_thread::yield();
  ANSWERS(CUDA_ERROR_NOT_READY, cuEventQuery(static_cast<CUevent>(left.load())));
  flag = 1;
  ends.join();
  OK(cuEventQuery(static_cast<CUevent>(left.load())));
  OK(cuEventDestroy_v2(static_cast<CUevent>(left.load())));
  OK(cuStreamCreate(&stream, 0));
  CHECK(captures() == 0);
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK(captures() == 1);
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphDestroy(graph));
  OK(cuStreamDestroy_v2(stream));
  OK(cuEventDestroy_v2(static_cast<CUevent>(left.load())));
}

}  // namespace

int main() {
  Job job;
  open_proxy();
  goes_and_comes(job, true);
  other_devices();
  streams_that_end();
  setenv("NCCL_CUMEM_ENABLE", "0", 1);
  setenv("MOORAGE_GPU_CACHE", "0", 1);
  goes_and_comes(job, false);
  unlink(socket_path().c_str());
  std::_Exit(0);
}
