// A CUDA driver without a GPU: device memory is files in memory, streams are threads, a kernel is one of a few by name.
// It behaves as the real one where the proxy must care, blocking calls and errors included.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define __CUDA_API_VERSION_INTERNAL 1
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#define FAKE extern "C" __attribute__((visibility("default")))

namespace fake {

inline constexpr int kVersion = 13000;
inline constexpr std::size_t kGranularity = std::size_t{2} << 20U;
inline constexpr std::size_t kTotal = std::size_t{8} << 30U;

struct Row {
  const char* base;
  int since;
  bool per_thread;
  void* function;
};
extern const Row kRows[];
extern const std::size_t kRowCount;

// The last function that this thread called, for tests.
void note(const char* name);

// Inside the per-thread variant of a function, the default stream is the thread's own.
struct AsPerThread {
  AsPerThread();
  ~AsPerThread();
};
inline CUstream per_thread(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

struct Context {
  int device = 0;
  unsigned flags = 0;
  bool primary = false;
  unsigned retained = 0;
  std::set<Context*> peers;  // contexts whose memory this one may use
};

// What every function checks first: initialised, in the process that did it.
CUresult usable();
Context* current();
void set_current(Context* context);
int device_count();

// ---- streams

struct Graph;
struct Event;

// A node of a graph: what it does is made of its parameters when the graph is instantiated.
struct Node {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  Graph* graph = nullptr;
  std::vector<Node*> before;
  std::function<void()> run;  // of what has no parameters that can be asked for
  CUDA_KERNEL_NODE_PARAMS kernel{};
  std::vector<std::vector<char>> arguments;
  std::vector<void*> pointers;
  CUDA_HOST_NODE_PARAMS host{};
  CUDA_MEMCPY3D copy{};
  CUevent event = nullptr;
  Graph* child = nullptr;
  Node* original = nullptr;  // of a clone
};

// What a kernel does with these arguments; an error as the driver answers it.
CUresult kernel_work(CUfunction function, void** arguments, std::function<void()>& work);
// How long each of its arguments is.
std::vector<std::size_t> kernel_arguments(CUfunction function);
std::function<void()> event_work(CUevent event, bool record);
Node* add_node(Graph& graph, Node node);
void destroy_graph(Graph* graph);

struct Stream {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  std::size_t unfinished = 0;
  bool stop = false;
  Context* context = nullptr;
  Graph* capture = nullptr;
  bool origin = false;             // the capture began here
  std::vector<Node*> captured;     // what comes next in the capture waits for these
  unsigned long long capture_id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id captured_by;
  std::thread thread;

  explicit Stream(Context* owner);
  ~Stream();
  void push(std::function<void()> work);
  void drain();
  bool idle();
};

// The stream behind a handle, the default ones included. Null: no such stream.
Stream* stream_of(CUstream handle);
// Run on the stream, or add to the graph that it captures.
CUresult submit(CUstream handle, std::function<void()> work);
CUresult submit(CUstream handle, Node node, std::function<void()> work);
std::vector<std::shared_ptr<Stream>> all_streams();
bool any_busy();
CUresult drain_context();

// ---- memory

// May `device` use [address, address + size)?
bool accessible(std::uintptr_t address, std::size_t size, int device);
void free_memory_of(Context* context);
void* translate(std::uintptr_t address);

}  // namespace fake
