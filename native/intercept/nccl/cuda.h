// The little that the proxy asks the CUDA driver, found in the libcuda.so.1 that the process has loaded.
#pragma once

namespace moorage::nccl::cuda {

// Is this stream captured into a graph? False without a driver.
bool capturing(void* stream);
enum class Work { Done, Busy };
// Is there work in the stream? A stream that is captured, or that is no more, has none.
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

// The default stream of each thread has one handle for all: nobody but the thread can ask for it.
inline bool per_thread(const void* stream) { return stream == reinterpret_cast<const void*>(2); }

}  // namespace moorage::nccl::cuda
