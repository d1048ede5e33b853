// What a forked child inherits of the driver, and how it gets rid of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moorage::forked {

// Register the handlers. Call once.
void start();

// Close the driver's descriptors and put empty memory of the same size in the place of its maps, so that CRIU can save
// the process. Memory that the job itself allocated through the driver (see `host_memory`) becomes inaccessible rather
// than empty: reading it must not give zeros in silence. Allocates nothing.
void drop_driver();

// Host memory that the job got from the driver. Kept in a table of fixed size; further ranges are not known.
void host_memory_added(const void* begin, std::size_t size);
void host_memory_removed(const void* begin);

}  // namespace moorage::forked
