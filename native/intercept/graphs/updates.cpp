// Updates of executable graphs: each is made by the driver, and again whenever the executable is made anew.
#include <algorithm>

#include "graphs.h"
#include "hooks.h"
#include "nodes.h"
#include "real.h"

namespace moorage::graphs {
namespace {

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

}  // namespace
}  // namespace moorage::graphs

namespace moorage::hook {

using namespace graphs;

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
