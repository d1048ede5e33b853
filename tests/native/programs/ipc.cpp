// Legacy IPC between two processes of a pod, over a checkpoint of both. This process is the broker, its children are
// the job.
#include <sys/wait.h>

#include <memory>

#include "broker.h"

namespace {

constexpr std::size_t kSize = (std::size_t{4} << 20U) + 12;

void put(int fd, const void* data, std::size_t size) {
  CHECK(write(fd, data, size) == static_cast<ssize_t>(size));
}
template <typename Value>
Value get(int fd) {
  Value value{};
  CHECK(read(fd, &value, sizeof value) == static_cast<ssize_t>(sizeof value));
  return value;
}

void fill(CUdeviceptr memory, unsigned value) { OK(cuMemsetD32_v2(memory, value, kSize / 4)); }
void holds(CUdeviceptr memory, unsigned value) {
  std::vector<unsigned> words(kSize / 4);
  OK(cuMemcpyDtoH_v2(words.data(), memory, kSize));
  for (const unsigned word : words) CHECK(word == value);
}

// The context of the other device, and this one's; both are current by turns.
struct Devices {
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  Devices() {
    OK(cuCtxGetCurrent(&first));
    OK(cuDevicePrimaryCtxRetain(&second, 1));
  }
};

void exporter(int in, int out) {
  begin();
  const Devices devices;
  OK(cuCtxSetCurrent(devices.second));
  CUdeviceptr memory = 0;
  OK(cuMemAlloc_v2(&memory, kSize));
  fill(memory, 1);
  CUipcMemHandle handle{};
  OK(cuIpcGetMemHandle(&handle, memory));
  CUdeviceptr own = 0;
  ANSWERS(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle_v2(&own, handle, 1));
  put(out, &handle, sizeof handle);
  for (unsigned value = 2; get<char>(in) == 'n'; value += 2) {
    holds(memory, value);  // as the other process wrote it
    fill(memory, value + 1);
    put(out, "k", 1);
  }
  OK(cuMemFree_v2(memory));
  put(out, "k", 1);
  get<char>(in);
}

void importer(int in, int out) {
  begin();
  const auto handle = get<CUipcMemHandle>(in);
  CUdeviceptr memory = 0;
  CUdeviceptr twice = 0;
  const Devices devices;
  OK(cuCtxSetCurrent(devices.second));
  OK(cuCtxEnablePeerAccess(devices.first, 0));
  OK(cuCtxSetCurrent(devices.first));
  OK(cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  OK(cuIpcOpenMemHandle_v2(&twice, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  CHECK(twice == memory);
  OK(cuIpcCloseMemHandle(twice));
  std::size_t size = 0;
  OK(cuMemGetAddressRange_v2(nullptr, &size, memory));
  CHECK(size == kSize);
  int device = -1;
  OK(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory));
  CHECK(device == 1);
  holds(memory, 1);
  for (unsigned value = 2; get<char>(in) == 'n'; value += 2) {
    fill(memory, value);
    put(out, "k", 1);
    get<char>(in);
    // Peer access to the context counts for what was opened there as well.
    OK(cuCtxSetCurrent(devices.second));
    holds(memory, value + 1);
    OK(cuCtxSetCurrent(devices.first));
    put(out, "k", 1);
  }
  // The other way round: what is opened in one context, and only then granted to the device where it lies.
  CUdeviceptr there = 0;
  OK(cuCtxSetCurrent(devices.second));
  OK(cuIpcOpenMemHandle_v2(&there, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  OK(cuCtxSetCurrent(devices.first));
  ANSWERS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemsetD32_v2(there, 1, 4));
  OK(cuCtxEnablePeerAccess(devices.second, 0));
  unsigned word = 0;
  OK(cuMemcpyDtoH_v2(&word, there, 4));
  OK(cuCtxDisablePeerAccess(devices.second));
  ANSWERS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemsetD32_v2(there, 1, 4));
  OK(cuIpcCloseMemHandle(there));
  OK(cuIpcCloseMemHandle(memory));
  put(out, "k", 1);
  CUdeviceptr gone = 0;
  get<char>(in);  // until the exporter has freed
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&gone, handle, 1));
}

struct Child {
  explicit Child(void (*body)(int, int)) {
    int to[2];
    int from[2];
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    pid = fork();
    if (pid == 0) {
      close(to[1]);
      close(from[0]);
      get<char>(to[0]);
      body(to[0], from[1]);
      std::_Exit(0);
    }
    close(to[0]);
    close(from[1]);
    in = to[1];
    out = from[0];
  }
  void tell(char what) const { put(in, &what, 1); }
  void heard() const { get<char>(out); }
  void ended() const {
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  }
  pid_t pid = -1;
  int in = -1;
  int out = -1;
};

// One exchange of values through the shared memory.
void exchange(const Child& first, const Child& second) {
  second.tell('n');
  second.heard();
  first.tell('n');
  first.heard();
  second.tell('n');
  second.heard();
}

}  // namespace

int main() {
  setenv("MOORAGE_GPU_SOCKET", socket_path().c_str(), 1);
  // Forked while this process has one thread; they begin when there is a broker.
  const Child first(exporter);
  const Child second(importer);
  auto broker = std::make_unique<Broker>(socket_path());
  first.tell('b');
  second.tell('b');
  const std::uint64_t processes[] = {broker->hello().process, broker->hello().process};
  const auto handle = get<CUipcMemHandle>(first.out);
  put(second.in, &handle, sizeof handle);
  exchange(first, second);
  broker->wait_for([](const auto& kept) { return kept.size() == 2; });

  for (int round = 0; round < 2; ++round) {
    for (const std::uint64_t process : processes) DONE(broker->quiesce(process, 20'000));
    const auto kept = broker->kept();
    for (const std::uint64_t process : processes) DONE(broker->evict(process));
    for (const std::uint64_t process : processes) broker->gone(process);
    broker.reset();
    broker = std::make_unique<Broker>(socket_path());
    broker->give(kept);
    for (const std::uint64_t process : processes) {
      CHECK(broker->hello(process).evicted == 1);
      broker->adopt(process);
      DONE(broker->map(process));
    }
    for (const std::uint64_t process : processes) DONE(broker->resume(process));
    exchange(first, second);
  }
  for (const std::uint64_t process : processes) {
    CHECK(broker->status(process).text.find("\"refusals\":[]") != std::string::npos);
  }
  second.tell('e');
  second.heard();
  first.tell('e');
  first.heard();
  broker->wait_for([](const auto& kept) { return kept.empty(); });
  second.tell('e');
  second.ended();
  first.tell('e');
  first.ended();
  unlink(socket_path().c_str());
  std::_Exit(0);
}
