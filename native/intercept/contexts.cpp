#include "contexts.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "hooks.h"
#include "bulk.h"
#include "real.h"

namespace moorage::contexts {
namespace {

std::mutex& mutex = *new std::mutex;
auto& made = *new std::vector<CUcontext>;  // by cuCtxCreate; the primary ones are asked for when it matters

CUresult created(CUcontext* context, CUresult result) {
  if (result == CUDA_SUCCESS) {
    const std::lock_guard lock(mutex);
    made.push_back(*context);
  }
  return result;
}

std::vector<CUcontext> list() {
  const std::lock_guard lock(mutex);
  return made;
}

// The primary context of a device that is in use, held until released.
struct Primary {
  explicit Primary(CUdevice number) : device(number) {
    unsigned flags = 0;
    int in_use = 0;
    if (real::cuDevicePrimaryCtxGetState(device, &flags, &in_use) != CUDA_SUCCESS || in_use == 0) return;
    if (real::cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS) context = nullptr;
  }
  ~Primary() {
    if (context != nullptr) real::cuDevicePrimaryCtxRelease_v2(device);
  }
  Primary(const Primary&) = delete;
  Primary& operator=(const Primary&) = delete;
  CUdevice device;
  CUcontext context = nullptr;
};

CUresult synchronize(CUcontext context) {
  CUresult result = real::cuCtxPushCurrent_v2(context);
  if (result != CUDA_SUCCESS) return result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_SUCCESS : result;
  result = real::cuCtxSynchronize();
  real::cuCtxPopCurrent_v2(nullptr);
  return result;
}

CUresult destroyed(CUcontext context, CUresult result) {
  if (result == CUDA_SUCCESS) {
    {
      const std::lock_guard lock(mutex);
      std::erase(made, context);
    }
    bulk::context_ended(context);
  }
  return result;
}

CUcontext primary_handle(CUdevice device) {
  const Primary primary(device);
  return primary.context;
}

CUresult primary_ended(CUdevice device, CUcontext before, bool always, CUresult result) {
  if (result != CUDA_SUCCESS || before == nullptr) return result;
  unsigned flags = 0;
  int in_use = 1;
  real::cuDevicePrimaryCtxGetState(device, &flags, &in_use);
  if (always || in_use == 0) bulk::context_ended(before);
  return result;
}

}  // namespace

CUresult synchronize_all(const std::function<void(const std::string&)>& next) {
  int devices = 0;
  CUresult result = real::cuDeviceGetCount(&devices);
  for (CUdevice device = 0; result == CUDA_SUCCESS && device < devices; ++device) {
    const Primary primary(device);
    if (primary.context == nullptr) continue;
    next("the primary context of device " + std::to_string(device));
    result = synchronize(primary.context);
  }
  for (const CUcontext context : list()) {
    if (result != CUDA_SUCCESS) return result;
    next("a context that the job made");
    result = synchronize(context);
  }
  return result;
}

Any::Any() {
  CUcontext context = nullptr;
  if (real::cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != nullptr) return;
  int devices = 0;
  real::cuDeviceGetCount(&devices);
  for (CUdevice device = 0; !pushed_ && device < devices; ++device) {
    const Primary primary(device);
    pushed_ = primary.context != nullptr && real::cuCtxPushCurrent_v2(primary.context) == CUDA_SUCCESS;
  }
  for (const CUcontext one : list()) {
    if (!pushed_) pushed_ = real::cuCtxPushCurrent_v2(one) == CUDA_SUCCESS;
  }
}

Any::~Any() {
  if (pushed_) real::cuCtxPopCurrent_v2(nullptr);
}

}  // namespace moorage::contexts

namespace moorage::hook {

using namespace contexts;

CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  return created(context, real::cuCtxCreate_v2(context, flags, device));
}
CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam* parameters, int count, unsigned flags,
                        CUdevice device) {
  return created(context, real::cuCtxCreate_v3(context, parameters, count, flags, device));
}
CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* parameters, unsigned flags, CUdevice device) {
  return created(context, real::cuCtxCreate_v4(context, parameters, flags, device));
}
CUresult cuCtxDestroy(CUcontext context) { return destroyed(context, real::cuCtxDestroy(context)); }
CUresult cuCtxDestroy_v2(CUcontext context) { return destroyed(context, real::cuCtxDestroy_v2(context)); }

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  const CUcontext before = primary_handle(device);
  return primary_ended(device, before, false, real::cuDevicePrimaryCtxRelease(device));
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  const CUcontext before = primary_handle(device);
  return primary_ended(device, before, false, real::cuDevicePrimaryCtxRelease_v2(device));
}
CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  const CUcontext before = primary_handle(device);
  return primary_ended(device, before, true, real::cuDevicePrimaryCtxReset(device));
}
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  const CUcontext before = primary_handle(device);
  return primary_ended(device, before, true, real::cuDevicePrimaryCtxReset_v2(device));
}

}  // namespace moorage::hook
