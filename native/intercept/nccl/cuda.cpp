#include "cuda.h"

#include <cstddef>

#include "entry.h"

namespace moorage::nccl::cuda {
namespace {

constexpr int kSuccess = 0;
// Answers of a driver that must not be asked because of a capture: cuda.h, CUDA_ERROR_STREAM_CAPTURE_*.
constexpr int kFirstOfCapture = 900;
constexpr int kLastOfCapture = 908;
constexpr int kRelaxed = 2;

constinit Entry<int(void*, int*)> is_capturing("cuStreamIsCapturing");
constinit Entry<int(void*)> query("cuStreamQuery");
constinit Entry<std::size_t()> captures_running("moorage_captures_running");
constinit Entry<int(void**)> get_current("cuCtxGetCurrent");
constinit Entry<int(void*)> set_current("cuCtxSetCurrent");
constinit Entry<int(void**, int)> retain_primary("cuDevicePrimaryCtxRetain");
constinit Entry<int(int*)> exchange_mode("cuThreadExchangeStreamCaptureMode");
constinit Entry<int(void**, unsigned)> create_stream("cuStreamCreate");
constinit Entry<int(void*)> end_stream("cuStreamDestroy_v2");
constinit Entry<int(void**, unsigned)> create_event("cuEventCreate");
constinit Entry<int(void*, void*)> record_event("cuEventRecord");
constinit Entry<int(void*, void*, unsigned)> wait_event("cuStreamWaitEvent");
constinit Entry<int(void*)> end_event("cuEventDestroy_v2");
constinit Entry<int(void*, int)> capture("cuStreamBeginCapture_v2");
constinit Entry<int(void*, void**)> captured("cuStreamEndCapture");
constinit Entry<int(void*)> end_graph("cuGraphDestroy");
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kNoTiming = 2;

}  // namespace

bool capturing(void* stream) {
  if (stream == nullptr) return false;  // the legacy stream cannot be captured
  auto* ask = is_capturing.get();
  int status = 0;
  return ask != nullptr && ask(stream, &status) == kSuccess && status != 0;
}

Work work(void* stream, void* context) {
  auto* ask = query.get();
  if (ask == nullptr) return Work::Done;
  // To ask for the legacy stream may break a capture in any other: then better later.
  auto* captures = captures_running.get();
  if (legacy(stream) && captures != nullptr && captures() != 0) return Work::Busy;
  if (current_context() != context) set_context(context);
  if (capturing(stream)) return Work::Busy;
  const int answer = ask(stream);
  return answer == kBusy || (answer >= kFirstOfCapture && answer <= kLastOfCapture) ? Work::Busy : Work::Done;
}

void* current_context() {
  auto* ask = get_current.get();
  void* context = nullptr;
  return ask != nullptr && ask(&context) == kSuccess ? context : nullptr;
}

void set_context(void* context) {
  if (auto* tell = set_current.get(); tell != nullptr && context != nullptr) tell(context);
}

void* primary_context(int device) {
  auto* ask = retain_primary.get();
  void* context = nullptr;
  return ask != nullptr && ask(&context, device) == kSuccess ? context : nullptr;
}

void* fresh_stream() {
  auto* make = create_stream.get();
  void* stream = nullptr;
  return make != nullptr && make(&stream, kNonBlocking) == kSuccess ? stream : nullptr;
}

void destroy_stream(void* stream) {
  if (auto* end = end_stream.get()) end(stream);
}

bool wait_for(void* stream, void* other) {
  void* event = nullptr;
  auto* make = create_event.get();
  if (make == nullptr || make(&event, kNoTiming) != kSuccess) return false;
  const bool well = record_event.get()(event, other) == kSuccess && wait_event.get()(stream, event, 0) == kSuccess;
  end_event.get()(event);
  return well;
}

bool begin_capture(void* stream) {
  auto* begin = capture.get();
  return begin != nullptr && begin(stream, kRelaxed) == kSuccess;
}

bool end_capture(void* stream, void** graph) {
  auto* end = captured.get();
  return end != nullptr && end(stream, graph) == kSuccess;
}

void destroy_graph(void* graph) {
  if (auto* end = end_graph.get()) end(graph);
}

void be_discreet() {
  int mode = kRelaxed;
  if (auto* exchange = exchange_mode.get()) exchange(&mode);
}

}  // namespace moorage::nccl::cuda
