// How the proxy comes to life, and cuInit, where a process begins to use CUDA.
#include <pthread.h>

#include "control.h"
#include "driver.h"
#include "fork.h"
#include "gate.h"
#include "hooks.h"
#include "real.h"

namespace moorage {
namespace {

// The loader runs this behind the driver's own constructors and before those of whoever depends on the proxy, with its
// lock held: no thread can call in before it is done, and nothing here calls the driver.
__attribute__((constructor)) void start() {
  gate::start();
  if (driver::load()) forked::start();
}

}  // namespace

namespace hook {

CUresult cuInit(unsigned int flags) {
  const CUresult result = real::cuInit(flags);
  if (result == CUDA_SUCCESS && !driver::initialised()) {
    driver::set_initialised();
    control::start();
  }
  return result;
}

}  // namespace hook
}  // namespace moorage
