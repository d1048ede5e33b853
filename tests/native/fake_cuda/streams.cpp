// Streams, events, kernels and host functions of the fake driver.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.h"

namespace fake {

struct Event {
  std::mutex mutex;
  std::condition_variable wake;
  std::size_t recorded = 0;
  std::size_t done = 0;
  bool destroyed = false;  // kept, so that a later use is seen
  Graph* graph = nullptr;  // recorded in a capture
  std::vector<Node*> captured;
};

namespace {

// Never destroyed: a process may end while its streams are busy, and a forked child has no threads to join.
std::mutex& mutex = *new std::mutex;
auto& streams = *new std::map<CUstream, std::shared_ptr<Stream>>;
auto& legacy = *new std::shared_ptr<Stream>;
thread_local CUstream own_default = nullptr;  // the thread's default stream, in `streams` as any other

struct Function {
  std::string name;
};
auto& kernels = *new std::map<std::string, Function>;

Stream& made(CUstream& handle, Context* context) {
  auto stream = std::make_shared<Stream>(context);
  handle = reinterpret_cast<CUstream>(stream.get());
  return *(streams[handle] = std::move(stream));
}

}  // namespace

Stream::Stream(Context* owner) : context(owner) {
  thread = std::thread([this] {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      auto work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      work();
      lock.lock();
      if (--unfinished == 0) wake.notify_all();
    }
  });
}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  wake.notify_all();
  thread.join();
}

void Stream::push(std::function<void()> work) {
  const std::lock_guard lock(mutex);
  queue.push_back(std::move(work));
  ++unfinished;
  wake.notify_all();
}

void Stream::drain() {
  std::unique_lock lock(mutex);
  wake.wait(lock, [this] { return unfinished == 0; });
}

bool Stream::idle() {
  const std::lock_guard lock(mutex);
  return unfinished == 0;
}

Stream* stream_of(CUstream handle) {
  const std::lock_guard lock(mutex);
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    if (!legacy) legacy = std::make_shared<Stream>(nullptr);
    return legacy.get();
  }
  if (handle == CU_STREAM_PER_THREAD) {
    if (own_default == nullptr) made(own_default, current());
    handle = own_default;
  }
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second.get();
}

CUresult submit(CUstream handle, std::function<void()> work) {
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  node.run = work;
  return submit(handle, std::move(node), std::move(work));
}

CUresult submit(CUstream handle, Node node, std::function<void()> work) {
  if (const CUresult bad = usable()) return bad;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Graph* graph = nullptr;
  {
    const std::lock_guard lock(stream->mutex);
    graph = stream->capture;
    if (graph != nullptr) node.before = stream->captured;
  }
  if (graph != nullptr) {  // without the stream's lock: that of the graphs comes first
    Node* added = add_node(*graph, std::move(node));
    const std::lock_guard lock(stream->mutex);
    stream->captured = {added};
    return CUDA_SUCCESS;
  }
  stream->push(std::move(work));
  return CUDA_SUCCESS;
}

// Shared: one may be destroyed by its thread while another waits for it.
std::vector<std::shared_ptr<Stream>> all_streams() {
  const std::lock_guard lock(mutex);
  std::vector<std::shared_ptr<Stream>> all;
  for (auto& [handle, stream] : streams) all.push_back(stream);
  if (legacy) all.push_back(legacy);
  return all;
}

bool any_busy() {
  const auto all = all_streams();
  return std::any_of(all.begin(), all.end(), [](const auto& stream) { return !stream->idle(); });
}

CUresult drain_context() {
  for (const auto& stream : all_streams()) {
    {
      const std::lock_guard lock(stream->mutex);
      if (stream->capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    stream->drain();
  }
  return CUDA_SUCCESS;
}

}  // namespace fake

using namespace fake;

FAKE CUresult cuStreamCreate(CUstream* stream, unsigned) {
  if (const CUresult bad = usable()) return bad;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(fake::mutex);
  made(*stream, current());
  return CUDA_SUCCESS;
}

FAKE CUresult cuStreamDestroy_v2(CUstream handle) {
  if (const CUresult bad = usable()) return bad;
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->drain();
  std::shared_ptr<Stream> gone;
  const std::lock_guard lock(fake::mutex);
  gone = std::move(streams[handle]);
  streams.erase(handle);
  return CUDA_SUCCESS;
}

FAKE CUresult cuStreamSynchronize(CUstream handle) {
  note("cuStreamSynchronize");
  if (const CUresult bad = usable()) return bad;
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->drain();
  return CUDA_SUCCESS;
}

FAKE CUresult cuStreamQuery(CUstream handle) {
  note("cuStreamQuery");
  if (const CUresult bad = usable()) return bad;
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Context* owner = stream->context != nullptr ? stream->context : current();
  *context = reinterpret_cast<CUcontext>(owner);
  return CUDA_SUCCESS;
}

FAKE CUresult cuCtxSynchronize() {
  note("cuCtxSynchronize");
  if (const CUresult bad = usable()) return bad;
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return drain_context();
}

FAKE CUresult cuEventCreate(CUevent* event, unsigned) {
  *event = reinterpret_cast<CUevent>(new Event);
  return usable();
}
FAKE CUresult cuEventDestroy_v2(CUevent handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  const std::lock_guard lock(event->mutex);
  event->destroyed = true;
  return CUDA_SUCCESS;
}

namespace fake {

std::function<void()> event_work(CUevent handle, bool record) {
  auto* event = reinterpret_cast<Event*>(handle);
  return [event, record] {
    std::unique_lock lock(event->mutex);
    if (event->destroyed) {
      std::fprintf(stderr, "fake CUDA: a graph runs with an event that was destroyed\n");
      std::abort();
    }
    if (!record) return event->wake.wait(lock, [event] { return event->done >= event->recorded; });
    event->done = ++event->recorded;
    event->wake.notify_all();
  };
}

}  // namespace fake

FAKE CUresult cuEventRecord(CUevent handle, CUstream stream) {
  note("cuEventRecord");
  auto* event = reinterpret_cast<Event*>(handle);
  if (Stream* const known = stream_of(stream)) {
    const std::lock_guard lock(known->mutex);
    if (known->capture != nullptr) {
      const std::lock_guard other(event->mutex);
      event->graph = known->capture;
      event->captured = known->captured;
      return CUDA_SUCCESS;
    }
  }
  std::size_t number = 0;
  {
    const std::lock_guard lock(event->mutex);
    number = ++event->recorded;
    event->graph = nullptr;
  }
  return submit(stream, [event, number] {
    const std::lock_guard lock(event->mutex);
    event->done = number;
    event->wake.notify_all();
  });
}
FAKE CUresult cuEventSynchronize(CUevent handle) {
  note("cuEventSynchronize");
  auto* event = reinterpret_cast<Event*>(handle);
  std::unique_lock lock(event->mutex);
  event->wake.wait(lock, [event] { return event->done >= event->recorded; });
  return CUDA_SUCCESS;
}
FAKE CUresult cuEventQuery(CUevent handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  const std::lock_guard lock(event->mutex);
  return event->done >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
FAKE CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned) {
  auto* event = reinterpret_cast<Event*>(handle);
  Graph* graph = nullptr;
  std::vector<Node*> captured;
  {
    const std::lock_guard lock(event->mutex);
    graph = event->graph;
    captured = event->captured;
  }
  if (graph != nullptr) {
    // The stream comes into the capture, or waits for another part of it.
    Stream* const known = stream_of(stream);
    if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(known->mutex);
    if (known->capture != nullptr && known->capture != graph) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    known->capture = graph;
    for (Node* node : captured) {
      if (std::find(known->captured.begin(), known->captured.end(), node) == known->captured.end()) {
        known->captured.push_back(node);
      }
    }
    return CUDA_SUCCESS;
  }
  return submit(stream, [event] {
    std::unique_lock lock(event->mutex);
    event->wake.wait(lock, [event] { return event->done >= event->recorded; });
  });
}

FAKE CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(&kernels);
  return usable();
}
FAKE CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  const std::lock_guard lock(fake::mutex);
  *function = reinterpret_cast<CUfunction>(&kernels.try_emplace(name, Function{name}).first->second);
  return usable();
}

namespace fake {

// add(pointer, int value, size_t count), spin(int ms), wait(int* flag on the host: until it is not 0), nccl(pointer to
// a function that is called with this pointer).
std::vector<std::size_t> kernel_arguments(CUfunction handle) {
  const std::string& name = reinterpret_cast<Function*>(handle)->name;
  if (name == "spin") return {sizeof(int)};
  if (name == "wait" || name == "nccl") return {sizeof(void*)};
  if (name == "add") return {sizeof(CUdeviceptr), sizeof(int), sizeof(std::size_t)};
  return {};
}

CUresult kernel_work(CUfunction handle, void** p, std::function<void()>& work) {
  const std::string& name = reinterpret_cast<Function*>(handle)->name;
  if (name == "spin") {
    const int ms = *static_cast<int*>(p[0]);
    work = [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    return CUDA_SUCCESS;
  }
  if (name == "wait") {
    auto* flag = *static_cast<std::atomic<int>**>(p[0]);
    work = [flag] {
      while (flag->load() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    return CUDA_SUCCESS;
  }
  if (name == "nccl") {
    void* const plan = *static_cast<void**>(p[0]);
    work = [plan] { (*static_cast<void (**)(void*)>(plan))(plan); };
    return CUDA_SUCCESS;
  }
  if (name == "add") {
    const auto address = static_cast<std::uintptr_t>(*static_cast<CUdeviceptr*>(p[0]));
    const int value = *static_cast<int*>(p[1]);
    const std::size_t count = *static_cast<std::size_t*>(p[2]);
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (!accessible(address, count * sizeof(int), current()->device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    work = [address, value, count] {
      auto* numbers = static_cast<int*>(translate(address));
      for (std::size_t i = 0; i < count; ++i) numbers[i] += value;
    };
    return CUDA_SUCCESS;
  }
  return name == "empty" ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace fake

FAKE CUresult cuLaunchKernel(CUfunction handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             CUstream stream, void** p, void**) {
  note("cuLaunchKernel");
  std::function<void()> work;
  if (const CUresult bad = kernel_work(handle, p, work)) return bad;
  if (!work) return usable();
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_KERNEL;
  node.kernel.func = handle;
  const auto sizes = kernel_arguments(handle);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    node.arguments.emplace_back(static_cast<char*>(p[i]), static_cast<char*>(p[i]) + sizes[i]);
  }
  return submit(stream, std::move(node), std::move(work));
}

FAKE CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  note("cuLaunchHostFunc");
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_HOST;
  node.host = {function, data};
  return submit(stream, std::move(node), [function, data] { function(data); });
}
