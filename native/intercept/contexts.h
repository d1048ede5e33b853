// The contexts of this process: what must be waited for before nothing runs on a device.
#pragma once

#include <functional>
#include <string>

#include "cuda_api.h"

namespace moorage::contexts {

// Wait for all work of all contexts. Blocks as long as the work runs. `next` is told of each context before it is
// waited for; what is returned is the answer of the last one.
CUresult synchronize_all(const std::function<void(const std::string&)>& next);

// Make any living context current for this thread, if there is one and none is.
class Any {
 public:
  Any();
  ~Any();
  Any(const Any&) = delete;
  Any& operator=(const Any&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace moorage::contexts
