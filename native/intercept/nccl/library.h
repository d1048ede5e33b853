// NCCL's own library: the file that this proxy stands in the place of.
#pragma once

#include <string>

namespace moorage::nccl::library {

// Where it is, or should be.
const std::string& path();
// Its version code; 0 when it cannot be loaded.
int version();

}  // namespace moorage::nccl::library
