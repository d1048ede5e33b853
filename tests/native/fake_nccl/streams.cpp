// libcuda.so.1 as far as NCCL's proxy and its fake need one: streams that are threads, which run host functions in order
// and take no more than a few before whoever launches has to wait. With it what the libcuda proxy tells of streams.
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotReady = 600;
constexpr int kInvalidHandle = 400;
constexpr std::size_t kQueue = 8;

struct Stream {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  std::size_t unfinished = 0;
  bool capturing = false;
};

std::mutex& mutex = *new std::mutex;
auto& streams = *new std::set<Stream*>;
thread_local void* current = reinterpret_cast<void*>(0x1000);

void serve(Stream* stream) {
  std::unique_lock lock(stream->mutex);
  for (;;) {
    stream->wake.wait(lock, [stream] { return !stream->queue.empty(); });
    auto work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->wake.notify_all();
    lock.unlock();
    work();
    lock.lock();
    --stream->unfinished;
    stream->wake.notify_all();
  }
}

Stream* made() {
  auto* stream = new Stream;  // never freed: its thread runs as long as the process
  {
    const std::lock_guard lock(mutex);
    streams.insert(stream);
  }
  std::thread(serve, stream).detach();
  return stream;
}

Stream* known(void* handle) {
  if (handle == reinterpret_cast<void*>(2)) {
    thread_local Stream* const own = made();
    return own;
  }
  if (reinterpret_cast<std::size_t>(handle) <= 1) {
    static Stream* const legacy = made();
    return legacy;
  }
  const std::lock_guard lock(mutex);
  auto* stream = static_cast<Stream*>(handle);
  return streams.count(stream) != 0 ? stream : nullptr;
}

int push(void* handle, std::function<void()> work) {
  Stream* stream = known(handle);
  if (stream == nullptr) return kInvalidHandle;
  std::unique_lock lock(stream->mutex);
  if (stream->capturing) return 0;  // a graph that nobody launches
  stream->wake.wait(lock, [stream] { return stream->queue.size() < kQueue; });
  stream->queue.push_back(std::move(work));
  ++stream->unfinished;
  stream->wake.notify_all();
  return 0;
}

struct Event {
  std::mutex mutex;
  std::condition_variable wake;
  std::size_t recorded = 0;
  std::size_t done = 0;
};

using Mark = void* (*)(void*);
void (*listener)(void*, Mark) = nullptr;

}  // namespace

FAKE int cuStreamCreate(void** out, unsigned) {
  *out = made();
  return 0;
}
FAKE int cuEventCreate(void** out, unsigned) {
  *out = new Event;  // never freed: a stream may still come to it
  return 0;
}
FAKE int cuEventDestroy_v2(void*) { return 0; }
FAKE int cuEventRecord(void* handle, void* stream) {
  auto* event = static_cast<Event*>(handle);
  std::size_t number = 0;
  {
    const std::lock_guard lock(event->mutex);
    number = ++event->recorded;
  }
  return push(stream, [event, number] {
    const std::lock_guard lock(event->mutex);
    event->done = number;
    event->wake.notify_all();
  });
}
FAKE int cuEventQuery(void* handle) {
  auto* event = static_cast<Event*>(handle);
  const std::lock_guard lock(event->mutex);
  return event->done >= event->recorded ? 0 : kNotReady;
}
FAKE int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* event = static_cast<Event*>(handle);
  std::size_t number = 0;
  {
    const std::lock_guard lock(event->mutex);
    number = event->recorded;
  }
  return push(stream, [event, number] {
    std::unique_lock lock(event->mutex);
    event->wake.wait(lock, [&] { return event->done >= number; });
  });
}
FAKE void moorage_tell_stream_ends(void (*tell)(void*, Mark)) { listener = tell; }
FAKE int cuStreamDestroy_v2(void* handle) {
  if (listener != nullptr) {
    listener(handle, [](void* stream) -> void* {
      void* event = nullptr;
      cuEventCreate(&event, 0);
      return cuEventRecord(event, stream) == 0 ? event : nullptr;
    });
  }
  const std::lock_guard lock(mutex);
  return streams.erase(static_cast<Stream*>(handle)) == 1 ? 0 : kInvalidHandle;
}
FAKE int cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
  return push(handle, [=] { function(data); });
}
FAKE int cuStreamQuery(void* handle) {
  Stream* stream = known(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard lock(stream->mutex);
  return stream->unfinished == 0 ? 0 : kNotReady;
}
FAKE int cuStreamSynchronize(void* handle) {
  Stream* stream = known(handle);
  if (stream == nullptr) return kInvalidHandle;
  std::unique_lock lock(stream->mutex);
  stream->wake.wait(lock, [stream] { return stream->unfinished == 0; });
  return 0;
}
FAKE int cuStreamIsCapturing(void* handle, int* status) {
  Stream* stream = known(handle);
  *status = 0;
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard lock(stream->mutex);
  *status = stream->capturing ? 1 : 0;
  return 0;
}
FAKE int cuStreamBeginCapture_v2(void* handle, int) {
  Stream* stream = known(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard lock(stream->mutex);
  stream->capturing = true;
  return 0;
}
FAKE int cuStreamEndCapture(void* handle, void** graph) {
  Stream* stream = known(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard lock(stream->mutex);
  stream->capturing = false;
  *graph = nullptr;
  return 0;
}
FAKE int cuCtxGetCurrent(void** out) {
  *out = current;
  return 0;
}
FAKE int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = reinterpret_cast<void*>(static_cast<std::size_t>(0x1000 + device));
  return 0;
}
FAKE int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
