// Stream captures in progress.
#pragma once

#include <cstddef>

#include "cuda_api.h"

namespace moorage::captures {

std::size_t running();
void after_fork_in_child();

}  // namespace moorage::captures
