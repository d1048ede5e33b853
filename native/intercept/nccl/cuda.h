// The little that the proxy asks the CUDA driver, found in the libcuda.so.1 that the process has loaded.
#pragma once

#include <cstdint>

namespace moorage::nccl::cuda {

// Is this stream captured into a graph? False without a driver.
bool capturing(void* stream);
enum class Work { Done, Busy };
// Is there work in the stream? One that is no more has none; of one that is captured nobody can say.
Work work(void* stream, void* context);

void* current_context();
void set_context(void* context);
// The device's primary context, kept for good. Null when there is none.
void* primary_context(int device);

// For captures of the proxy's own. Null, or false: the driver refused.
void* fresh_stream();
void destroy_stream(void* stream);
// What comes into the first stream waits for what is in the second.
bool wait_for(void* stream, void* other);
bool begin_capture(void* stream);
bool end_capture(void* stream, void** graph);
void destroy_graph(void* graph);

// This thread asks, and whoever captures a stream is not disturbed by it.
void be_discreet();

// As cuda.h has them.
inline constexpr int kBusy = 600;
inline void* const kPerThread = reinterpret_cast<void*>(2);

inline bool per_thread(const void* stream) { return stream == kPerThread; }
// The default stream that all threads of a context share, by either of its handles.
inline bool legacy(const void* stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 1; }

}  // namespace moorage::nccl::cuda
