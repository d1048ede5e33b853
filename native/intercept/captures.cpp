#include "captures.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "gate.h"
#include "graphs/graphs.h"
#include "hooks.h"
#include "real.h"
#include "streams.h"

namespace moorage::captures {
namespace {

// The default streams have one handle for all contexts or threads; who began the capture tells them apart.
struct Capture {
  CUstream stream;
  long thread;
  CUgraph graph;
};

struct State {
  std::mutex mutex;
  std::vector<Capture> list;
};
alignas(State) unsigned char storage[sizeof(State)];
State& state() {
  static State* const one = new (storage) State;  // never destroyed: threads may call while the process ends
  return *one;
}
std::atomic<std::size_t> count{0};

bool shared_handle(CUstream stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

CUresult began(CUstream stream, CUresult result, bool per_thread = false) {
  if (result != CUDA_SUCCESS) return result;
  // Asked now: the driver does not tell when the capture has become invalid.
  CUgraph graph = graphs::capture_of(per_thread && stream == nullptr ? CU_STREAM_PER_THREAD : stream);
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.list.push_back({stream, syscall(SYS_gettid), graph});
  count.store(all.list.size());
  return result;
}

void ended(CUstream stream, bool well) {
  State& all = state();
  CUgraph graph = nullptr;
  {
    const std::lock_guard lock(all.mutex);
    const long thread = syscall(SYS_gettid);
    const auto found = std::find_if(all.list.begin(), all.list.end(), [&](const Capture& capture) {
      return capture.stream == stream && (!shared_handle(stream) || capture.thread == thread);
    });
    if (found == all.list.end()) return;
    graph = found->graph;
    all.list.erase(found);
    count.store(all.list.size());
  }
  graphs::after_end(graph, well);
  if (gate::now() != Level::Open) gate::changed();
}

}  // namespace

std::size_t running() { return count.load(); }

void after_fork_in_child() {
  new (storage) State;
  count.store(0);
}

}  // namespace moorage::captures

namespace moorage::hook {

using captures::began;
using captures::ended;

CUresult cuStreamBeginCapture(CUstream stream) { return began(stream, real::cuStreamBeginCapture(stream)); }
CUresult cuStreamBeginCapture_ptsz(CUstream stream) { return began(stream, real::cuStreamBeginCapture_ptsz(stream), true); }
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return began(stream, real::cuStreamBeginCapture_v2(stream, mode));
}
CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return began(stream, real::cuStreamBeginCapture_v2_ptsz(stream, mode), true);
}

#if CUDA_VERSION >= 12030
CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                     const CUgraphEdgeData* edges, size_t number, CUstreamCaptureMode mode) {
  graphs::changes(graph);
  return began(stream, real::cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, number, mode));
}
CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                          const CUgraphEdgeData* edges, size_t number, CUstreamCaptureMode mode) {
  graphs::changes(graph);
  return began(stream, real::cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, number, mode), true);
}
#endif

#if CUDA_VERSION >= 13030
CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                       CUgraphRecaptureCallback callback, void* data) {
  graphs::changes(graph);
  return began(stream, real::cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data));
}
CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                            CUgraphRecaptureCallback callback, void* data) {
  graphs::changes(graph);
  return began(stream, real::cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, callback, data), true);
}
#endif

// A capture has ended also when the driver answers that it had become invalid.
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  const CUresult result = real::cuStreamEndCapture(stream, graph);
  if (result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) ended(stream, result == CUDA_SUCCESS);
  return result;
}
CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
  const CUresult result = real::cuStreamEndCapture_ptsz(stream, graph);
  if (result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) ended(stream, result == CUDA_SUCCESS);
  return result;
}

CUresult cuStreamDestroy(CUstream stream) {
  streams::ends(stream);
  const CUresult result = real::cuStreamDestroy(stream);
  if (result == CUDA_SUCCESS) ended(stream, false);
  return result;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  streams::ends(stream);
  const CUresult result = real::cuStreamDestroy_v2(stream);
  if (result == CUDA_SUCCESS) ended(stream, false);
  return result;
}

}  // namespace moorage::hook
