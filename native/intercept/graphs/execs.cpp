// Executable graphs: what the job holds is a handle of the proxy's, because the driver's own is made anew.
#include <algorithm>

#include "captures.h"
#include "gate.h"
#include "graphs.h"
#include "hooks.h"
#include "nodes.h"
#include "real.h"

namespace moorage::graphs {

Exec* exec_of(CUgraphExec handle) {
  auto* const exec = reinterpret_cast<Exec*>(handle);
  return state().executables.contains(exec) ? exec : nullptr;
}

void each(Exec& exec, const std::function<void(Graph&)>& tell) {
  const std::function<void(Graph&)> walk = [&](Graph& graph) {
    tell(graph);
    for (const Graph::Inner& inner : graph.inside) {
      const bool replaced = std::any_of(exec.children.begin(), exec.children.end(), [&](const auto& one) {
        return counterpart(exec, one.first) == inner.node;
      });
      if (!replaced) walk(*inner.graph);
    }
  };
  walk(*exec.base);
  for (const auto& [node, graph] : exec.children) each(*graph, tell);
}

void share_out(Exec& exec) {
  auto shares = std::make_shared<std::vector<Exec::Share>>();
  each(exec, [&](Graph& graph) {
    for (const Holding& one : graph.holdings) {
      const Owner* const owner = one.part->capture->owner;
      auto share = std::find_if(shares->begin(), shares->end(), [&](const auto& s) { return s.owner == owner; });
      if (share == shares->end()) share = shares->insert(share, {owner, {}});
      share->parts.push_back(one.part->number);
    }
  });
  exec.shares = std::move(shares);
}

CUgraphNode counterpart(Exec& exec, CUgraphNode node) {
  if (exec.pairs.empty()) return node;
  const auto found = exec.pairs.find(node);
  return found == exec.pairs.end() ? node : found->second;
}

Using::Using(CUgraphExec handle) : real_(handle) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] return;
  lock_ = std::unique_lock(state().mutex);
  if (const Exec* exec = exec_of(handle)) {
    real_ = exec->real;
  } else {
    lock_.unlock();
  }
}

namespace {

// `make` instantiates for the driver.
template <typename Make>
CUresult instantiated(CUgraphExec* out, CUgraph handle, cuuint64_t flags, Make make) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] return make();
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto graph = find(handle);
  const CUresult result = make();
  if (result != CUDA_SUCCESS || graph == nullptr || !holds(*graph)) return result;
  if ((flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0) {
    all.foreign[*out] = "graph " + text_of(handle) + " was instantiated for launch from the device, whose handle is "
                        "known there, and holds nodes of NCCL";
    return result;
  }
  auto* const exec = new Exec;
  exec->real = *out;
  exec->base = graph;
  exec->flags = flags & ~static_cast<cuuint64_t>(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
  real::cuCtxGetCurrent(&exec->context);
  exec->stale = std::any_of(graph->holdings.begin(), graph->holdings.end(), [](const auto& h) { return h.part->stale; });
  hold(*graph);
  share_out(*exec);
  all.executables.insert(exec);
  all.order.push_back(exec);
  *out = reinterpret_cast<CUgraphExec>(exec);
  return result;
}

void keep(Exec& exec, Update update) {
  std::erase_if(exec.updates, [&](const Update& one) { return one.node == update.node && one.kind == update.kind; });
  exec.updates.push_back(std::move(update));
}

// A change of one node of an executable: made now, and again whenever the executable is made anew. `note` answers how.
template <typename Change, typename Note>
CUresult updated(CUgraphExec handle, CUgraphNode node, int kind, Change change, Note note) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] return change(handle, node);
  Trash trash;
  State& all = state();
  std::unique_lock lock(all.mutex);
  Exec* const exec = exec_of(handle);
  if (exec == nullptr) {
    lock.unlock();
    return change(handle, node);
  }
  if (exec->unpaired) {
    exec->troubles.push_back("node " + text_of(node) + " was updated in an executable that had been updated by a graph "
                             "with another order of nodes");
  }
  if (all.of_nccl.contains(node)) {
    exec->troubles.push_back("the job updated node " + text_of(node) + " of graph " + text_of(exec->base->handle) +
                             ", which NCCL added");
  }
  // Until the first rebuild, the driver knows the executable by the job's own nodes; after it, by those of the base.
  CUresult result = change(exec->real, counterpart(*exec, node));
  if (result != CUDA_SUCCESS && counterpart(*exec, node) != node) result = change(exec->real, node);
  if (result != CUDA_SUCCESS) return result;
  Update update{node, kind, note()};
  if (update.replay) {
    keep(*exec, std::move(update));
  } else {
    exec->troubles.push_back("an update of node " + text_of(node) + " of graph " + text_of(exec->base->handle) +
                             " cannot be made again");
  }
  return result;
}

template <typename Value, typename Set>
auto again_with(const Value* given, Set set) {
  return [given, set]() -> std::function<CUresult(CUgraphExec, CUgraphNode)> {
    if (given == nullptr) return {};
    return [value = *given, set](CUgraphExec exec, CUgraphNode node) { return set(exec, node, value); };
  };
}

// A graph of one node, which keeps a copy of a kernel's arguments.
class Kept {
 public:
  explicit Kept(const CUDA_KERNEL_NODE_PARAMS* given) {
    if (real::cuGraphCreate(&graph_, 0) != CUDA_SUCCESS) return;
    if (real::cuGraphAddKernelNode_v2(&node_, graph_, nullptr, 0, given) != CUDA_SUCCESS) node_ = nullptr;
  }
  explicit Kept(const CUDA_KERNEL_NODE_PARAMS_v1* given) {
    if (real::cuGraphCreate(&graph_, 0) != CUDA_SUCCESS) return;
    if (real::cuGraphAddKernelNode(&node_, graph_, nullptr, 0, given) != CUDA_SUCCESS) node_ = nullptr;
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (graph_ != nullptr) real::cuGraphDestroy(graph_);
  }
  bool good() const { return node_ != nullptr; }
  CUresult replay(CUgraphExec exec, CUgraphNode node) const {
    CUDA_KERNEL_NODE_PARAMS value{};
    const CUresult result = real::cuGraphKernelNodeGetParams_v2(node_, &value);
    return result == CUDA_SUCCESS ? real::cuGraphExecKernelNodeSetParams_v2(exec, node, &value) : result;
  }

 private:
  CUgraph graph_ = nullptr;
  CUgraphNode node_ = nullptr;
};

template <typename Given>
std::function<CUresult(CUgraphExec, CUgraphNode)> kernel_again(const Given* given) {
  const auto kept = std::make_shared<Kept>(given);
  if (!kept->good()) return {};
  return [kept](CUgraphExec exec, CUgraphNode node) { return kept->replay(exec, node); };
}

// What cuGraphExecNodeSetParams says, by type.
std::function<CUresult(CUgraphExec, CUgraphNode)> params_again(const CUgraphNodeParams& given) {
  switch (given.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS value{};
      value.func = given.kernel.func;
      value.gridDimX = given.kernel.gridDimX;
      value.gridDimY = given.kernel.gridDimY;
      value.gridDimZ = given.kernel.gridDimZ;
      value.blockDimX = given.kernel.blockDimX;
      value.blockDimY = given.kernel.blockDimY;
      value.blockDimZ = given.kernel.blockDimZ;
      value.sharedMemBytes = given.kernel.sharedMemBytes;
      value.kernelParams = given.kernel.kernelParams;
      value.extra = given.kernel.extra;
      value.kern = given.kernel.kern;
      value.ctx = given.kernel.ctx;
      return kernel_again(&value);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return [value = given](CUgraphExec exec, CUgraphNode node) {
        CUgraphNodeParams copy = value;
        return real::cuGraphExecNodeSetParams(exec, node, &copy);
      };
    default: return {};
  }
}

// The child graph that an update brought: a clone, with what NCCL captured into it.
std::shared_ptr<Graph> cloned(CUgraph child) {
  CUgraph clone = nullptr;
  if (real::cuGraphClone(&clone, child) != CUDA_SUCCESS) return nullptr;
  const auto known = find(child);
  auto made = known == nullptr ? find_or_add(clone) : copy_parts(*known, clone, [clone](CUgraphNode node) {
    CUgraphNode found = nullptr;
    return real::cuGraphNodeFindInClone(&found, node, clone) == CUDA_SUCCESS ? found : nullptr;
  });
  made->ours = true;
  return made;
}

void drop_children(Exec& exec, Trash& trash) {
  for (const auto& [node, graph] : exec.children) drop(graph, trash);
  exec.children.clear();
}

// The executable does from now on what this graph says.
void updated_by(Exec& exec, CUgraph handle, Trash& trash) {
  const auto next = find_or_add(handle);
  // The job's nodes are those of the graph of which it was made.
  const nodes::List old = nodes::of(exec.base->handle);
  const nodes::List fresh = nodes::of(handle);
  std::unordered_map<CUgraphNode, CUgraphNode> step;
  const bool paired = nodes::same_shape(old, fresh);
  for (std::size_t i = 0; paired && i < old.size(); ++i) step[old[i]] = fresh[i];
  exec.unpaired = exec.unpaired || !paired;
  if (exec.pairs.empty()) {
    exec.pairs = std::move(step);
  } else {
    for (auto& [job, base] : exec.pairs) {
      const auto found = step.find(base);
      base = found == step.end() ? nullptr : found->second;
    }
  }
  const auto before = exec.base;
  exec.base = next;
  exec.updates.clear();
  drop_children(exec, trash);
  hold(*next);
  let_go(before, trash);
  share_out(exec);
}

template <typename Change>
CUresult updated_whole(CUgraphExec handle, CUgraph graph, Change change) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] return change(handle);
  Trash trash;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  Exec* const exec = exec_of(handle);
  const CUresult result = change(exec == nullptr ? handle : exec->real);
  if (result != CUDA_SUCCESS) return result;
  if (exec != nullptr) {
    updated_by(*exec, graph, trash);
  } else if (const auto known = find(graph); known != nullptr && holds(*known)) {
    all.foreign[handle] = "graph " + text_of(graph) + ", which holds nodes of NCCL, updated an executable that was made "
                          "of a graph without any";
  }
  return result;
}

struct Launching {
  CUgraphExec real = nullptr;
  std::shared_ptr<const std::vector<Exec::Share>> shares;
  bool stale = false;
};

Launching look_up(CUgraphExec handle) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const Exec* exec = exec_of(handle);
  if (exec == nullptr) return {.real = handle, .shares = nullptr};
  return {.real = exec->real, .shares = exec->shares, .stale = exec->stale};
}

// While it is captured, a launch becomes a child graph.
void launch_was_captured(CUgraphExec handle, CUgraph into, const nodes::List& before) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const Exec* exec = exec_of(handle);
  if (exec == nullptr) return;
  const auto outer = find_or_add(into);
  for (CUgraphNode node : nodes::of(into)) {
    if (std::find(before.begin(), before.end(), node) != before.end()) continue;
    if (CUgraph inner = nodes::child(node)) put_inside(*outer, node, copy_parts_found(*exec->base, inner));
  }
  if (!holds(*outer)) {
    outer->troubles.push_back("graph " + text_of(into) + " captured the launch of graph " +
                              text_of(exec->base->handle) + ", and no child graph was found for it");
  }
}

template <typename Launch>
CUresult launched(Fn function, CUgraphExec handle, CUstream stream, Launch launch) {
  Launching now{.real = handle, .shares = nullptr};
  if (watching.load(std::memory_order_relaxed)) [[unlikely]] now = look_up(handle);
  if (now.shares == nullptr) {
    const Call call(function);
    return call.admitted() ? launch(handle) : call.refusal();
  }
  if (CUgraph into = captures::running() == 0 ? nullptr : capture_of(stream)) {
    const Call call(function);
    if (!call.admitted()) return call.refusal();
    const nodes::List before = nodes::of(into);
    const CUresult result = launch(now.real);
    if (result == CUDA_SUCCESS) launch_was_captured(handle, into, before);
    return result;
  }
  // NCCL's gate comes first: a thread that is held there is outside of this one.
  std::vector<std::pair<const Owner*, void*>> let_in;
  for (const Exec::Share& share : *now.shares) {
    let_in.emplace_back(share.owner, share.owner->launching(share.parts.data(), share.parts.size(), stream));
  }
  CUresult result = CUDA_ERROR_NOT_INITIALIZED;
  {
    const Call call(function);
    // It may have been made anew meanwhile.
    now = look_up(handle);
    if (call.admitted()) result = now.stale || now.real == nullptr ? CUDA_ERROR_LAUNCH_FAILED : launch(now.real);
  }
  for (auto one = let_in.rbegin(); one != let_in.rend(); ++one) one->first->launched(one->second);
  return result;
}

CUstream own_default(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

// A node was added that has a graph inside.
void child_added(CUgraph handle, CUgraphNode node, CUgraph child) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto known = find(child);
  if (known == nullptr || !holds(*known)) return;
  const auto outer = find_or_add(handle);
  CUgraph inner = nodes::child(node);
  if (inner == child) {
    put_inside(*outer, node, known);
  } else if (inner != nullptr) {
    put_inside(*outer, node, copy_parts_found(*known, inner));
  }
}

void node_added(CUgraph graph, CUgraphNode node, const CUgraphNodeParams* params) {
  if (params == nullptr) return;
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) child_added(graph, node, params->graph.graph);
  if (params->type != CU_GRAPH_NODE_TYPE_CONDITIONAL || params->conditional.phGraph_out == nullptr) return;
  watching.store(true);
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto outer = find_or_add(graph);
  for (unsigned i = 0; i < params->conditional.size; ++i) {
    CUgraph body = params->conditional.phGraph_out[i];
    all.bodies[body] = graph;
    put_inside(*outer, node, find_or_add(body));
  }
}

}  // namespace
}  // namespace moorage::graphs

namespace moorage::hook {

using namespace graphs;

CUresult cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, CUgraphNode* bad, char* log, size_t size) {
  return instantiated(exec, graph, 0, [&] { return real::cuGraphInstantiate(exec, graph, bad, log, size); });
}
CUresult cuGraphInstantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* bad, char* log, size_t size) {
  return instantiated(exec, graph, 0, [&] { return real::cuGraphInstantiate_v2(exec, graph, bad, log, size); });
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return instantiated(exec, graph, flags, [&] { return real::cuGraphInstantiateWithFlags(exec, graph, flags); });
}
CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  return instantiated(exec, graph, params == nullptr ? 0 : params->flags,
                      [&] { return real::cuGraphInstantiateWithParams(exec, graph, params); });
}
CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  return instantiated(exec, graph, params == nullptr ? 0 : params->flags,
                      [&] { return real::cuGraphInstantiateWithParams_ptsz(exec, graph, params); });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return launched(Fn::cuGraphLaunch, exec, stream, [&](CUgraphExec real) { return real::cuGraphLaunch(real, stream); });
}
CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
  return launched(Fn::cuGraphLaunch_ptsz, exec, own_default(stream),
                  [&](CUgraphExec real) { return real::cuGraphLaunch_ptsz(real, stream); });
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] return real::cuGraphExecDestroy(handle);
  std::unique_ptr<Exec> gone;
  Trash trash;
  {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    all.foreign.erase(handle);
    Exec* const exec = exec_of(handle);
    if (exec != nullptr) {
      gone.reset(exec);
      all.executables.erase(exec);
      std::erase(all.order, exec);
      drop_children(*exec, trash);
      let_go(exec->base, trash);
    }
  }
  if (gone == nullptr) return real::cuGraphExecDestroy(handle);
  return gone->real == nullptr ? CUDA_SUCCESS : real::cuGraphExecDestroy(gone->real);
}

// Executables that NCCL's nodes are in are made of it again: until the last of them is gone, it stays.
CUresult cuGraphDestroy(CUgraph handle) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] return real::cuGraphDestroy(handle);
  Trash trash;
  State& all = state();
  std::unique_lock lock(all.mutex);
  const auto graph = find(handle);
  if (graph == nullptr) {
    lock.unlock();
    return real::cuGraphDestroy(handle);
  }
  if (graph->executables > 0) {
    graph->given_up = true;
    return CUDA_SUCCESS;
  }
  const CUresult result = real::cuGraphDestroy(handle);
  if (result == CUDA_SUCCESS) drop(graph, trash);
  lock.unlock();
  return result;
}

CUresult cuGraphClone(CUgraph* out, CUgraph original) {
  const CUresult result = real::cuGraphClone(out, original);
  if (result != CUDA_SUCCESS || !watching.load(std::memory_order_relaxed)) [[likely]] return result;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto known = find(original);
  if (known == nullptr || !holds(*known)) return result;
  copy_parts(*known, *out, [clone = *out](CUgraphNode node) {
    CUgraphNode found = nullptr;
    return real::cuGraphNodeFindInClone(&found, node, clone) == CUDA_SUCCESS ? found : nullptr;
  });
  return result;
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* before, size_t count,
                                  CUgraph child) {
  changes(graph);
  const CUresult result = real::cuGraphAddChildGraphNode(node, graph, before, count, child);
  if (result == CUDA_SUCCESS && watching.load(std::memory_order_relaxed)) child_added(graph, *node, child);
  return result;
}

CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* before, size_t count,
                        CUgraphNodeParams* params) {
  changes(graph);
  const CUresult result = real::cuGraphAddNode(node, graph, before, count, params);
  if (result == CUDA_SUCCESS) node_added(graph, *node, params);
  return result;
}
CUresult cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* before, const CUgraphEdgeData* edges,
                           size_t count, CUgraphNodeParams* params) {
  changes(graph);
  const CUresult result = real::cuGraphAddNode_v2(node, graph, before, edges, count, params);
  if (result == CUDA_SUCCESS) node_added(graph, *node, params);
  return result;
}

#if CUDA_VERSION >= 13040
CUresult cuGraphAddNode_v3(CUgraphNode* node, CUgraph graph, const CUgraphNode* before, const CUgraphEdgeData* edges,
                           size_t count, CUgraphNodeParams* params) {
  changes(graph);
  const CUresult result = real::cuGraphAddNode_v3(node, graph, before, edges, count, params);
  if (result == CUDA_SUCCESS) node_added(graph, *node, params);
  return result;
}
#endif

// ---- updates

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* bad, CUgraphExecUpdateResult* what) {
  return updated_whole(exec, graph, [&](CUgraphExec real) { return real::cuGraphExecUpdate(real, graph, bad, what); });
}
CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* what) {
  return updated_whole(exec, graph, [&](CUgraphExec real) { return real::cuGraphExecUpdate_v2(real, graph, what); });
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_KERNEL,
      [&](auto real, auto at) { return real::cuGraphExecKernelNodeSetParams(real, at, params); },
      [&] { return kernel_again(params); });
}
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_KERNEL,
      [&](auto real, auto at) { return real::cuGraphExecKernelNodeSetParams_v2(real, at, params); },
      [&] { return kernel_again(params); });
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* params,
                                        CUcontext context) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_MEMCPY,
      [&](auto real, auto at) { return real::cuGraphExecMemcpyNodeSetParams(real, at, params, context); },
      again_with(params, [context](auto real, auto at, const auto& value) {
        return real::cuGraphExecMemcpyNodeSetParams(real, at, &value, context);
      }));
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params,
                                        CUcontext context) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_MEMSET,
      [&](auto real, auto at) { return real::cuGraphExecMemsetNodeSetParams(real, at, params, context); },
      again_with(params, [context](auto real, auto at, const auto& value) {
        return real::cuGraphExecMemsetNodeSetParams(real, at, &value, context);
      }));
}
CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_HOST,
      [&](auto real, auto at) { return real::cuGraphExecHostNodeSetParams(real, at, params); },
      again_with(params, [](auto real, auto at, const auto& value) {
        return real::cuGraphExecHostNodeSetParams(real, at, &value);
      }));
}
CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
      [&](auto real, auto at) { return real::cuGraphExecEventRecordNodeSetEvent(real, at, event); },
      again_with(&event, [](auto real, auto at, const auto& value) {
        return real::cuGraphExecEventRecordNodeSetEvent(real, at, value);
      }));
}
CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
      [&](auto real, auto at) { return real::cuGraphExecEventWaitNodeSetEvent(real, at, event); },
      again_with(&event, [](auto real, auto at, const auto& value) {
        return real::cuGraphExecEventWaitNodeSetEvent(real, at, value);
      }));
}
CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* params) {
  return updated(
      exec, node, params == nullptr ? 0 : static_cast<int>(params->type),
      [&](auto real, auto at) { return real::cuGraphExecNodeSetParams(real, at, params); },
      [&] { return params_again(*params); });
}
CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
  return updated(
      exec, node, -1, [&](auto real, auto at) { return real::cuGraphNodeSetEnabled(real, at, enabled); },
      again_with(&enabled, [](auto real, auto at, const auto& value) {
        return real::cuGraphNodeSetEnabled(real, at, value);
      }));
}

namespace {
// Updates that are made, and cannot be made again: refused at prepare.
std::function<CUresult(CUgraphExec, CUgraphNode)> never() { return {}; }
}  // namespace

CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS* params) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
      [&](auto real, auto at) { return real::cuGraphExecBatchMemOpNodeSetParams(real, at, params); }, never);
}
CUresult cuGraphExecExternalSemaphoresSignalNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                          const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS* params) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL,
      [&](auto real, auto at) { return real::cuGraphExecExternalSemaphoresSignalNodeSetParams(real, at, params); },
      never);
}
CUresult cuGraphExecExternalSemaphoresWaitNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                        const CUDA_EXT_SEM_WAIT_NODE_PARAMS* params) {
  return updated(
      exec, node, CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT,
      [&](auto real, auto at) { return real::cuGraphExecExternalSemaphoresWaitNodeSetParams(real, at, params); },
      never);
}
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec handle, CUgraphNode node, CUgraph child) {
  if (!watching.load(std::memory_order_relaxed)) [[likely]] {
    return real::cuGraphExecChildGraphNodeSetParams(handle, node, child);
  }
  Trash trash;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  Exec* const exec = exec_of(handle);
  if (exec == nullptr) {
    const CUresult result = real::cuGraphExecChildGraphNodeSetParams(handle, node, child);
    const auto known = find(child);
    if (result == CUDA_SUCCESS && known != nullptr && holds(*known)) {
      all.foreign[handle] = "child graph " + text_of(child) + ", which holds nodes of NCCL, updated node " +
                            text_of(node) + " of an executable that was made of a graph without any";
    }
    return result;
  }
  const CUresult result = real::cuGraphExecChildGraphNodeSetParams(exec->real, counterpart(*exec, node), child);
  if (result != CUDA_SUCCESS) return result;
  const auto clone = cloned(child);
  if (clone == nullptr) {
    exec->troubles.push_back("child graph " + text_of(child) + " updated node " + text_of(node) + " of graph " +
                             text_of(exec->base->handle) + " and cannot be cloned");
    return result;
  }
  if (const auto before = exec->children.find(node); before != exec->children.end()) drop(before->second, trash);
  exec->children[node] = clone;
  keep(*exec, {node, CU_GRAPH_NODE_TYPE_GRAPH, [inner = clone->handle](CUgraphExec real, CUgraphNode at) {
                 return real::cuGraphExecChildGraphNodeSetParams(real, at, inner);
               }});
  share_out(*exec);
  return result;
}

}  // namespace moorage::hook
