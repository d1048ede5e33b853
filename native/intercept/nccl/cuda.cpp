#include "cuda.h"

#include "entry.h"

namespace moorage::nccl::cuda {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr int kRelaxed = 2;

constinit Entry<int(void*, int*)> is_capturing("cuStreamIsCapturing");
constinit Entry<int(void*)> query("cuStreamQuery");
constinit Entry<int(void**)> get_current("cuCtxGetCurrent");
constinit Entry<int(void*)> set_current("cuCtxSetCurrent");
constinit Entry<int(void**, int)> retain_primary("cuDevicePrimaryCtxRetain");
constinit Entry<int(int*)> exchange_mode("cuThreadExchangeStreamCaptureMode");

}  // namespace

bool capturing(void* stream) {
  if (stream == nullptr) return false;  // the legacy stream cannot be captured
  auto* ask = is_capturing.get();
  int status = 0;
  return ask != nullptr && ask(stream, &status) == kSuccess && status != 0;
}

Work work(void* stream, void* context) {
  auto* ask = query.get();
  if (ask == nullptr || capturing(stream)) return Work::Done;
  if (current_context() != context) set_context(context);
  return ask(stream) == kNotReady ? Work::Busy : Work::Done;
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

void be_discreet() {
  int mode = kRelaxed;
  if (auto* exchange = exchange_mode.get()) exchange(&mode);
}

}  // namespace moorage::nccl::cuda
