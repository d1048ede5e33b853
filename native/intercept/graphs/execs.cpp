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

void drop_children(Exec& exec, Trash& trash) {
  for (const auto& [node, graph] : exec.children) drop(graph, trash);
  exec.children.clear();
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

void note_captured_launch(CUgraphExec handle) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (Exec* exec = exec_of(handle)) {
    exec->troubles.push_back("the launch of graph " + text_of(exec->base->handle) + " was captured into another one");
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
  // The driver does not capture launches (CUDA 13.0 answers 900). One that would is counted by nobody: it is refused.
  if (captures::running() > 0 && capture_of(stream) != nullptr) {
    const Call call(function);
    if (!call.admitted()) return call.refusal();
    const CUresult result = launch(now.real);
    if (result == CUDA_SUCCESS) note_captured_launch(handle);
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

}  // namespace moorage::hook
