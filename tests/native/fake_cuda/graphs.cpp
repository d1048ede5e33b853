// Captures and graphs of the fake driver: typed nodes with edges, clones, executables, user objects. What the real driver
// refuses (to clone or to instantiate twice where memory is allocated, to update an event), this one refuses.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "fake.h"

namespace fake {

struct Object {
  CUhostFn destroy;
  void* data;
  std::atomic<unsigned> references;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<Object*> objects;
  std::vector<std::unique_ptr<Graph>> children;
  bool clone = false;
  std::atomic<unsigned> executables{0};
};

namespace {

struct Exec {
  struct Step {
    Node* origin;
    std::function<void()> run;
    bool enabled = true;
    CUevent event = nullptr;
  };
  std::vector<Step> steps;
  std::vector<Object*> objects;
  Graph* graph = nullptr;
  unsigned long long flags = 0;
};

// Of everything here: graphs are not touched often.
std::recursive_mutex& mutex = *new std::recursive_mutex;
auto& graphs = *new std::set<Graph*>;
auto& executables = *new std::set<Exec*>;
unsigned long long captures = 0;

using Lock = std::lock_guard<std::recursive_mutex>;

void release(Object* object) {
  if (--object->references > 0) return;
  // As a driver does it: some other thread, some time.
  std::thread([object] {
    object->destroy(object->data);
    delete object;
  }).detach();
}

Graph* known(CUgraph handle) {
  auto* graph = reinterpret_cast<Graph*>(handle);
  return graphs.count(graph) != 0 ? graph : nullptr;
}
Exec* known(CUgraphExec handle) {
  auto* exec = reinterpret_cast<Exec*>(handle);
  if (executables.count(exec) == 0) {
    std::fprintf(stderr, "fake CUDA: no such executable graph\n");
    std::abort();  // a proxy that hands on handles of its own
  }
  return exec;
}
Node* node_of(CUgraphNode handle) { return reinterpret_cast<Node*>(handle); }
CUgraphNode handle_of(Node* node) { return reinterpret_cast<CUgraphNode>(node); }

Graph* fresh() {
  auto* graph = new Graph;
  graphs.insert(graph);
  return graph;
}

bool allocates(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const auto& node) {
    return node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || (node->child != nullptr && allocates(*node->child));
  });
}

void point(Node& node) {
  node.pointers.clear();
  for (auto& argument : node.arguments) node.pointers.push_back(argument.data());
  node.kernel.kernelParams = node.pointers.data();
}

Graph* cloned(const Graph& graph) {
  Graph* copy = fresh();
  copy->clone = true;
  std::map<const Node*, Node*> pairs;
  for (const auto& node : graph.nodes) {
    Node made = *node;
    made.original = node.get();
    if (node->child != nullptr) made.child = cloned(*node->child);
    Node* there = add_node(*copy, std::move(made));
    if (there->child != nullptr) {
      graphs.insert(there->child);
    }
    pairs[node.get()] = there;
  }
  for (const auto& node : copy->nodes) {
    for (Node*& one : node->before) one = pairs.at(one);
  }
  for (Object* object : graph.objects) {
    ++object->references;
    copy->objects.push_back(object);
  }
  return copy;
}

std::function<void()> work_of(const Node& node, CUresult& bad) {
  std::function<void()> work = node.run;
  switch (node.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      auto arguments = node.arguments;
      std::vector<void*> pointers;
      for (auto& argument : arguments) pointers.push_back(argument.data());
      bad = kernel_work(node.kernel.func, pointers.data(), work);
      break;
    }
    case CU_GRAPH_NODE_TYPE_HOST: work = [host = node.host] { host.fn(host.userData); }; break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: work = event_work(node.event, false); break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: work = event_work(node.event, true); break;
    default: break;
  }
  return work;
}

// Each node behind those that it waits for; otherwise as they were added.
std::vector<Node*> ordered(const Graph& graph) {
  std::vector<Node*> order;
  std::set<const Node*> done;
  while (order.size() < graph.nodes.size()) {
    const std::size_t before = order.size();
    for (const auto& node : graph.nodes) {
      if (done.count(node.get()) != 0) continue;
      if (!std::all_of(node->before.begin(), node->before.end(), [&](Node* one) { return done.count(one) != 0; })) continue;
      done.insert(node.get());
      order.push_back(node.get());
    }
    if (order.size() == before) return {};
  }
  return order;
}

CUresult fill(Exec& exec, const Graph& graph) {
  for (Node* node : ordered(graph)) {
    if (node->child != nullptr) {
      if (const CUresult bad = fill(exec, *node->child)) return bad;
      continue;
    }
    CUresult bad = CUDA_SUCCESS;
    auto work = work_of(*node, bad);
    if (bad != CUDA_SUCCESS) return bad;
    exec.steps.push_back({node, std::move(work), true, node->event});
  }
  for (Object* object : graph.objects) {
    ++object->references;
    exec.objects.push_back(object);
  }
  return CUDA_SUCCESS;
}

CUresult instantiate(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  const Lock lock(mutex);
  Graph* graph = known(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (allocates(*graph) && graph->executables > 0) return CUDA_ERROR_NOT_SUPPORTED;
  auto* exec = new Exec;
  exec->graph = graph;
  exec->flags = flags;
  if (const CUresult bad = fill(*exec, *graph)) {
    delete exec;
    return bad;
  }
  ++graph->executables;
  executables.insert(exec);
  *out = reinterpret_cast<CUgraphExec>(exec);
  return usable();
}

CUresult add(CUgraphNode* out, CUgraph handle, const CUgraphNode* before, std::size_t count, Node node) {
  const Lock lock(mutex);
  Graph* graph = known(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i) node.before.push_back(node_of(before[i]));
  *out = handle_of(add_node(*graph, std::move(node)));
  return CUDA_SUCCESS;
}

template <typename Copy>
CUresult in_exec(CUgraphExec handle, CUgraphNode node, Copy change) {
  const Lock lock(mutex);
  Exec* exec = known(handle);
  for (Exec::Step& step : exec->steps) {
    if (step.origin != node_of(node)) continue;
    Node changed = *step.origin;
    if (const CUresult bad = change(changed, step)) return bad;
    CUresult bad = CUDA_SUCCESS;
    step.run = work_of(changed, bad);
    return bad;
  }
  return CUDA_ERROR_INVALID_VALUE;  // no node of the graph that it was made of
}

void set_kernel(Node& node, const CUDA_KERNEL_NODE_PARAMS& params) {
  node.kernel = params;
  std::vector<std::vector<char>> arguments;
  const auto sizes = kernel_arguments(params.func);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto* from = static_cast<const char*>(params.kernelParams[i]);
    arguments.emplace_back(from, from + sizes[i]);
  }
  node.arguments = std::move(arguments);
  point(node);
}

}  // namespace

Node* add_node(Graph& graph, Node node) {
  const Lock lock(mutex);
  node.graph = &graph;
  graph.nodes.push_back(std::make_unique<Node>(std::move(node)));
  point(*graph.nodes.back());
  return graph.nodes.back().get();
}

void destroy_graph(Graph* graph) {
  const Lock lock(mutex);
  graphs.erase(graph);
  for (const auto& node : graph->nodes) {
    if (node->child != nullptr) destroy_graph(node->child);
  }
  for (Object* object : graph->objects) release(object);
  graph->objects.clear();
  graph->nodes.clear();  // the rest is kept: executables count themselves there
}

}  // namespace fake

using namespace fake;

// ---- captures

namespace {
CUresult begin(CUstream handle, CUgraph graph, const CUgraphNode* before, size_t count, CUstreamCaptureMode mode) {
  if (const CUresult bad = usable()) return bad;
  Stream* stream = stream_of(handle);
  if (stream == nullptr || handle == nullptr || handle == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::lock_guard lock(stream->mutex);  // a stream's lock comes before that of all graphs
  const Lock all(fake::mutex);
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  stream->capture = graph == nullptr ? fresh() : known(graph);
  stream->origin = true;
  stream->captured.clear();
  for (std::size_t i = 0; i < count; ++i) stream->captured.push_back(node_of(before[i]));
  stream->capture_id = ++captures;
  stream->mode = mode;
  stream->captured_by = std::this_thread::get_id();
  return CUDA_SUCCESS;
}
}  // namespace
FAKE CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, const CUgraphNode* before,
                                          const CUgraphEdgeData*, size_t count, CUstreamCaptureMode mode) {
  return begin(handle, graph, before, count, mode);
}
FAKE CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  note("cuStreamBeginCapture_v2");
  return begin(handle, nullptr, nullptr, 0, mode);
}
FAKE CUresult cuStreamBeginCapture(CUstream stream) {
  return begin(stream, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
}
FAKE CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  note("cuStreamEndCapture");
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Graph* captured = nullptr;
  {
    const std::lock_guard lock(stream->mutex);
    if (stream->capture == nullptr || !stream->origin) return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->mode != CU_STREAM_CAPTURE_MODE_RELAXED && stream->captured_by != std::this_thread::get_id()) {
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    captured = stream->capture;
  }
  for (const auto& one : all_streams()) {
    const std::lock_guard lock(one->mutex);
    if (one->capture != captured) continue;
    one->capture = nullptr;
    one->origin = false;
    one->captured.clear();
  }
  *graph = reinterpret_cast<CUgraph>(captured);
  return CUDA_SUCCESS;
}
FAKE CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(stream->mutex);
  *status = stream->capture != nullptr ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
FAKE CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                        const CUgraphNode** before, size_t* count) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(stream->mutex);
  *status = stream->capture != nullptr ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream->capture == nullptr) return CUDA_SUCCESS;
  if (id != nullptr) *id = reinterpret_cast<cuuint64_t>(stream->capture);
  if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(stream->capture);
  if (before != nullptr) *before = reinterpret_cast<const CUgraphNode*>(stream->captured.data());
  if (count != nullptr) *count = stream->captured.size();
  return CUDA_SUCCESS;
}
FAKE CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode* nodes, size_t count, unsigned flags) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(stream->mutex);
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->captured.clear();
  for (std::size_t i = 0; i < count; ++i) stream->captured.push_back(node_of(nodes[i]));
  return CUDA_SUCCESS;
}

// ---- graphs

FAKE CUresult cuGraphCreate(CUgraph* out, unsigned) {
  const Lock lock(fake::mutex);
  *out = reinterpret_cast<CUgraph>(fresh());
  return usable();
}
FAKE CUresult cuGraphDestroy(CUgraph handle) {
  const Lock lock(fake::mutex);
  Graph* graph = known(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  destroy_graph(graph);
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphClone(CUgraph* out, CUgraph handle) {
  const Lock lock(fake::mutex);
  Graph* graph = known(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (allocates(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
  *out = reinterpret_cast<CUgraph>(cloned(*graph));
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphNodeFindInClone(CUgraphNode* out, CUgraphNode original, CUgraph handle) {
  const Lock lock(fake::mutex);
  Graph* graph = known(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& node : graph->nodes) {
    if (node->original != node_of(original)) continue;
    *out = handle_of(node.get());
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
FAKE CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  const Lock lock(fake::mutex);
  Graph* graph = known(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; nodes != nullptr && i < std::min(*count, graph->nodes.size()); ++i) {
    nodes[i] = handle_of(graph->nodes[i].get());
  }
  *count = graph->nodes.size();
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = node_of(node)->type;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* before, size_t* count) {
  const Lock lock(fake::mutex);
  const auto& all = node_of(node)->before;
  for (std::size_t i = 0; before != nullptr && i < std::min(*count, all.size()); ++i) before[i] = handle_of(all[i]);
  *count = all.size();
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode* after, size_t* count) {
  const Lock lock(fake::mutex);
  std::vector<Node*> all;
  for (const auto& node : node_of(handle)->graph->nodes) {
    if (std::count(node->before.begin(), node->before.end(), node_of(handle)) != 0) all.push_back(node.get());
  }
  for (std::size_t i = 0; after != nullptr && i < std::min(*count, all.size()); ++i) after[i] = handle_of(all[i]);
  *count = all.size();
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphAddDependencies(CUgraph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  const Lock lock(fake::mutex);
  for (std::size_t i = 0; i < count; ++i) node_of(to[i])->before.push_back(node_of(from[i]));
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphDestroyNode(CUgraphNode handle) {
  const Lock lock(fake::mutex);
  Node* gone = node_of(handle);
  Graph* graph = gone->graph;
  if (allocates(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
  for (const auto& node : graph->nodes) std::erase(node->before, gone);
  std::erase_if(graph->nodes, [gone](const auto& node) { return node.get() == gone; });
  return CUDA_SUCCESS;
}

// ---- nodes

FAKE CUresult cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS* params) {
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_KERNEL;
  set_kernel(node, *params);
  return add(out, graph, before, count, std::move(node));
}
FAKE CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* params) {
  *params = node_of(node)->kernel;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
  const Lock lock(fake::mutex);
  set_kernel(*node_of(node), *params);
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode, CUgraphNode) { return CUDA_SUCCESS; }
FAKE CUresult cuGraphAddHostNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count,
                                 const CUDA_HOST_NODE_PARAMS* params) {
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_HOST;
  node.host = *params;
  return add(out, graph, before, count, std::move(node));
}
FAKE CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS* params) {
  *params = node_of(node)->host;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  node_of(node)->host = *params;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count) {
  return add(out, graph, before, count, Node());
}
FAKE CUresult cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count,
                                        CUevent event) {
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
  node.event = event;
  return add(out, graph, before, count, std::move(node));
}
FAKE CUresult cuGraphAddEventWaitNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count,
                                      CUevent event) {
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
  node.event = event;
  return add(out, graph, before, count, std::move(node));
}
FAKE CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent* event) {
  *event = node_of(node)->event;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
  node_of(node)->event = event;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent* event) {
  *event = node_of(node)->event;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
  node_of(node)->event = event;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphAddMemAllocNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count,
                                     CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  params->dptr = 0x7000;
  return add(out, graph, before, count, std::move(node));
}
FAKE CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count,
                                       CUgraph child) {
  const Lock lock(fake::mutex);
  if (known(child) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_GRAPH;
  node.child = cloned(*known(child));
  return add(out, graph, before, count, std::move(node));
}
FAKE CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* graph) {
  *graph = reinterpret_cast<CUgraph>(node_of(node)->child);
  return CUDA_SUCCESS;
}
// Only conditional nodes, whose body runs once.
FAKE CUresult cuGraphAddNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, const CUgraphEdgeData*,
                                size_t count, CUgraphNodeParams* params) {
  if (params->type != CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_NOT_SUPPORTED;
  const Lock lock(fake::mutex);
  Node node;
  node.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  node.child = fresh();
  params->conditional.phGraph_out = reinterpret_cast<CUgraph*>(new Graph*(node.child));  // as long as the process
  return add(out, graph, before, count, std::move(node));
}

// ---- executables

FAKE CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return instantiate(exec, graph, flags);
}
FAKE CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  return instantiate(exec, graph, params->flags);
}
FAKE CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t* flags) {
  const Lock lock(fake::mutex);
  *flags = known(exec)->flags;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphUpload(CUgraphExec exec, CUstream) {
  const Lock lock(fake::mutex);
  known(exec);
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  note("cuGraphLaunch");
  Stream* stream = stream_of(stream_handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  {
    const std::lock_guard lock(stream->mutex);
    if (stream->capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  std::vector<Exec::Step> steps;
  {
    const Lock lock(fake::mutex);
    steps = known(handle)->steps;
  }
  for (const Exec::Step& step : steps) {
    if (!step.enabled || !step.run) continue;
    if (const CUresult bad = submit(stream_handle, step.run)) return bad;
  }
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphExecDestroy(CUgraphExec handle) {
  const Lock lock(fake::mutex);
  Exec* exec = known(handle);
  executables.erase(exec);
  --exec->graph->executables;
  for (Object* object : exec->objects) release(object);
  delete exec;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo* info) {
  const Lock lock(fake::mutex);
  Exec* exec = known(handle);
  Graph* graph = known(graph_handle);
  Exec next;
  const CUresult bad = fill(next, *graph);
  bool fits = bad == CUDA_SUCCESS && next.steps.size() == exec->steps.size();
  for (std::size_t i = 0; fits && i < next.steps.size(); ++i) {
    fits = next.steps[i].origin->type == exec->steps[i].origin->type && next.steps[i].event == exec->steps[i].event;
    if (fits) next.steps[i].origin = exec->steps[i].origin;
  }
  if (!fits) {
    for (Object* object : next.objects) release(object);
    info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  std::swap(exec->steps, next.steps);
  std::swap(exec->objects, next.objects);
  for (Object* object : next.objects) release(object);
  info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_KERNEL_NODE_PARAMS* params) {
  return in_exec(exec, node, [&](Node& changed, Exec::Step&) {
    set_kernel(changed, *params);
    return CUDA_SUCCESS;
  });
}
FAKE CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  return in_exec(exec, node, [&](Node& changed, Exec::Step&) {
    changed.host = *params;
    return CUDA_SUCCESS;
  });
}
FAKE CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
  return in_exec(exec, node, [&](Node&, Exec::Step& step) {
    step.enabled = enabled != 0;
    return CUDA_SUCCESS;
  });
}
FAKE CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec, CUgraphNode, CUevent) { return CUDA_ERROR_INVALID_VALUE; }

// ---- user objects

FAKE CUresult cuUserObjectCreate(CUuserObject* out, void* data, CUhostFn destroy, unsigned count, unsigned) {
  *out = reinterpret_cast<CUuserObject>(new Object{destroy, data, {count}});
  return CUDA_SUCCESS;
}
FAKE CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
  while (count-- > 0) release(reinterpret_cast<Object*>(object));
  return CUDA_SUCCESS;
}
FAKE CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  const Lock lock(fake::mutex);
  auto* retained = reinterpret_cast<Object*>(object);
  if ((flags & CU_GRAPH_USER_OBJECT_MOVE) == 0) retained->references += count;
  for (; count > 0; --count) known(graph)->objects.push_back(retained);
  return CUDA_SUCCESS;
}
