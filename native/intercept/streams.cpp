#include "streams.h"

#include <array>
#include <atomic>
#include <cstddef>

#include "captures.h"
#include "real.h"

namespace moorage::streams {
namespace {

// An event behind all that is in the stream, for whoever asked; null when there can be none.
using Mark = void* (*)(void* stream);
using Listener = void (*)(void* stream, Mark mark);

std::array<std::atomic<Listener>, 16> listeners{};  // one for each libnccl in the process

void* mark(void* handle) {
  auto* const stream = static_cast<CUstream>(handle);
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUcontext context = nullptr;
  if (real::cuStreamIsCapturing(stream, &capture) != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE ||
      real::cuStreamGetCtx(stream, &context) != CUDA_SUCCESS || real::cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) {
    return nullptr;
  }
  CUevent event = nullptr;
  if (real::cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
    event = nullptr;
  } else if (real::cuEventRecord(event, stream) != CUDA_SUCCESS) {
    real::cuEventDestroy_v2(event);
    event = nullptr;
  }
  real::cuCtxPopCurrent_v2(nullptr);
  return event;
}

}  // namespace

void ends(CUstream stream) {
  for (const auto& listener : listeners) {
    const Listener tell = listener.load(std::memory_order_acquire);
    if (tell == nullptr) return;
    tell(stream, mark);
  }
}

}  // namespace moorage::streams

extern "C" {

__attribute__((visibility("default"))) void moorage_tell_stream_ends(moorage::streams::Listener listener) {
  for (auto& one : moorage::streams::listeners) {
    moorage::streams::Listener free = nullptr;
    if (one.compare_exchange_strong(free, listener) || free == listener) return;
  }
}

__attribute__((visibility("default"))) std::size_t moorage_captures_running() { return moorage::captures::running(); }

}
