// For a libnccl proxy in the same process, which finds these by name: when streams end, and whether any is captured.
#pragma once

#include "cuda_api.h"

namespace moorage::streams {

// The stream is about to be destroyed; what is in it goes on.
void ends(CUstream stream);

}  // namespace moorage::streams
