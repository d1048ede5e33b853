#include "nodes.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <unordered_map>

#include "graphs.h"
#include "real.h"

namespace moorage::graphs::nodes {
namespace {

using Edge = std::pair<std::size_t, std::size_t>;
using Places = std::unordered_map<CUgraphNode, std::size_t>;

Places places(const List& list) {
  Places found;
  for (std::size_t i = 0; i < list.size(); ++i) found[list[i]] = i;
  return found;
}

// What a node waits for. False: the driver does not say.
bool dependencies(CUgraphNode node, List& found) {
  std::size_t count = 0;
  found.clear();
  if (real::cuGraphNodeGetDependencies_v2(node, nullptr, nullptr, &count) == CUDA_SUCCESS) {
    found.resize(count);
    std::vector<CUgraphEdgeData> data(count);
    return count == 0 ||
           real::cuGraphNodeGetDependencies_v2(node, found.data(), data.data(), &count) == CUDA_SUCCESS;
  }
  if (real::cuGraphNodeGetDependencies(node, nullptr, &count) != CUDA_SUCCESS) return false;
  found.resize(count);
  return count == 0 || real::cuGraphNodeGetDependencies(node, found.data(), &count) == CUDA_SUCCESS;
}

bool dependents(CUgraphNode node, List& found) {
  std::size_t count = 0;
  found.clear();
  if (real::cuGraphNodeGetDependentNodes_v2(node, nullptr, nullptr, &count) == CUDA_SUCCESS) {
    found.resize(count);
    std::vector<CUgraphEdgeData> data(count);
    return count == 0 ||
           real::cuGraphNodeGetDependentNodes_v2(node, found.data(), data.data(), &count) == CUDA_SUCCESS;
  }
  if (real::cuGraphNodeGetDependentNodes(node, nullptr, &count) != CUDA_SUCCESS) return false;
  found.resize(count);
  return count == 0 || real::cuGraphNodeGetDependentNodes(node, found.data(), &count) == CUDA_SUCCESS;
}

bool inner_edges(const List& list, std::set<Edge>& edges) {
  const Places known = places(list);
  for (std::size_t i = 0; i < list.size(); ++i) {
    List before;
    if (!dependencies(list[i], before)) return false;
    for (CUgraphNode node : before) {
      const auto found = known.find(node);
      if (found != known.end()) edges.insert({found->second, i});
    }
  }
  return true;
}

bool failed(const char* call, CUgraphNode node, CUresult result, std::string& why) {
  if (result == CUDA_SUCCESS) return false;
  why = std::string(call) + " of " + type_name(node) + " node " + text_of(node) + " answered " +
        std::to_string(static_cast<int>(result));
  return true;
}

// Get from one, set in the other.
template <typename Value, typename Get, typename Set>
bool hand_over(const char* call, CUgraphNode from, CUgraphNode to, Get get, Set set, std::string& why) {
  Value value{};
  if (failed("reading", from, get(from, &value), why)) return false;
  return !failed(call, to, set(to, value), why);
}

// Of a kernel's attributes only what belongs to the kernel: its priority belongs to the place in the graph.
bool hand_over_attributes(CUgraphNode from, CUgraphNode to, std::string& why) {
  for (const CUkernelNodeAttrID attribute :
       {CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN}) {
    CUkernelNodeAttrValue wanted{};
    CUkernelNodeAttrValue there{};
    if (real::cuGraphKernelNodeGetAttribute(from, attribute, &wanted) != CUDA_SUCCESS) continue;
    if (real::cuGraphKernelNodeGetAttribute(to, attribute, &there) != CUDA_SUCCESS) continue;
    const bool same = attribute == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                          ? std::memcmp(&wanted.clusterDim, &there.clusterDim, sizeof wanted.clusterDim) == 0
                          : wanted.memSyncDomain == there.memSyncDomain;
    if (same) continue;
    if (failed("setting an attribute", to, real::cuGraphKernelNodeSetAttribute(to, attribute, &wanted), why)) {
      return false;
    }
  }
  return true;
}

CUcontext context_now() {
  CUcontext context = nullptr;
  real::cuCtxGetCurrent(&context);
  return context;
}

// A node in `graph` that does what `from` does.
bool add_like(CUgraph graph, CUgraphNode from, const List& after, CUgraphNode& made, std::string& why) {
  const std::size_t count = after.size();
  const CUgraphNode* const before = after.data();
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  switch (type(from)) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS value{};
      result = real::cuGraphKernelNodeGetParams_v2(from, &value);
      if (result == CUDA_SUCCESS) result = real::cuGraphAddKernelNode_v2(&made, graph, before, count, &value);
      if (result == CUDA_SUCCESS) result = real::cuGraphKernelNodeCopyAttributes(made, from);
      break;
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      CUDA_HOST_NODE_PARAMS value{};
      result = real::cuGraphHostNodeGetParams(from, &value);
      if (result == CUDA_SUCCESS) result = real::cuGraphAddHostNode(&made, graph, before, count, &value);
      break;
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: {
      CUevent event = nullptr;
      result = real::cuGraphEventRecordNodeGetEvent(from, &event);
      if (result == CUDA_SUCCESS) result = real::cuGraphAddEventRecordNode(&made, graph, before, count, event);
      break;
    }
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: {
      CUevent event = nullptr;
      result = real::cuGraphEventWaitNodeGetEvent(from, &event);
      if (result == CUDA_SUCCESS) result = real::cuGraphAddEventWaitNode(&made, graph, before, count, event);
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      CUDA_MEMCPY3D value{};
      result = real::cuGraphMemcpyNodeGetParams(from, &value);
      if (result == CUDA_SUCCESS) {
        result = real::cuGraphAddMemcpyNode(&made, graph, before, count, &value, context_now());
      }
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      CUDA_MEMSET_NODE_PARAMS value{};
      result = real::cuGraphMemsetNodeGetParams(from, &value);
      if (result == CUDA_SUCCESS) {
        result = real::cuGraphAddMemsetNode(&made, graph, before, count, &value, context_now());
      }
      break;
    }
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
      CUDA_BATCH_MEM_OP_NODE_PARAMS value{};
      result = real::cuGraphBatchMemOpNodeGetParams(from, &value);
      if (result == CUDA_SUCCESS) result = real::cuGraphAddBatchMemOpNode(&made, graph, before, count, &value);
      break;
    }
    case CU_GRAPH_NODE_TYPE_EMPTY: result = real::cuGraphAddEmptyNode(&made, graph, before, count); break;
    default: break;
  }
  return !failed("adding one like it", from, result, why);
}

}  // namespace

List of(CUgraph graph) {
  std::size_t count = 0;
  if (real::cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS) return {};
  List found(count);
  if (count == 0 || real::cuGraphGetNodes(graph, found.data(), &count) != CUDA_SUCCESS) return {};
  found.resize(count);
  return found;
}

List all_of(CUgraph graph) {
  List found = of(graph);
  const std::size_t own = found.size();
  for (std::size_t i = 0; i < own; ++i) {
    CUgraph inner = child(found[i]);
    if (inner == nullptr) continue;
    const List more = all_of(inner);
    found.insert(found.end(), more.begin(), more.end());
  }
  return found;
}

CUgraphNodeType type(CUgraphNode node) {
  constexpr auto kUnknown = static_cast<CUgraphNodeType>(31);
  CUgraphNodeType found = kUnknown;
  return node != nullptr && real::cuGraphNodeGetType(node, &found) == CUDA_SUCCESS ? found : kUnknown;
}

const char* type_name(CUgraphNode node) {
  switch (type(node)) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return "kernel";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "memcpy";
    case CU_GRAPH_NODE_TYPE_MEMSET: return "memset";
    case CU_GRAPH_NODE_TYPE_HOST: return "host";
    case CU_GRAPH_NODE_TYPE_GRAPH: return "child graph";
    case CU_GRAPH_NODE_TYPE_EMPTY: return "empty";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return "event wait";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "event record";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return "memory allocation";
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return "memory free";
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return "batch memory operation";
    case CU_GRAPH_NODE_TYPE_CONDITIONAL: return "conditional";
    default: return "unknown";
  }
}

bool movable(CUgraphNode node) {
  switch (type(node)) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EMPTY:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return true;
    default: return false;
  }
}

bool same_shape(const List& one, const List& other) {
  if (one.size() != other.size()) return false;
  for (std::size_t i = 0; i < one.size(); ++i) {
    if (type(one[i]) != type(other[i])) return false;
  }
  std::set<Edge> here;
  std::set<Edge> there;
  return inner_edges(one, here) && inner_edges(other, there) && here == there;
}

namespace {

void mix(std::size_t& hash, std::size_t value) { hash = (hash ^ value) * 0x100000001b3ULL + (hash >> 29U); }

// What a node does, as far as it can be asked.
std::size_t doing(CUgraphNode node) {
  std::size_t hash = 0xcbf29ce484222325ULL;
  mix(hash, static_cast<std::size_t>(type(node)));
  const auto pointer = [&](const auto* value) { mix(hash, reinterpret_cast<std::uintptr_t>(value)); };
  switch (type(node)) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS value{};
      if (real::cuGraphKernelNodeGetParams_v2(node, &value) == CUDA_SUCCESS) pointer(value.func);
      mix(hash, value.gridDimX);
      mix(hash, value.blockDimX);
      break;
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      CUDA_HOST_NODE_PARAMS value{};
      if (real::cuGraphHostNodeGetParams(node, &value) == CUDA_SUCCESS) {
        pointer(reinterpret_cast<void*>(value.fn));
        pointer(value.userData);
      }
      break;
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: {
      CUevent event = nullptr;
      if (real::cuGraphEventRecordNodeGetEvent(node, &event) == CUDA_SUCCESS) pointer(event);
      break;
    }
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: {
      CUevent event = nullptr;
      if (real::cuGraphEventWaitNodeGetEvent(node, &event) == CUDA_SUCCESS) pointer(event);
      break;
    }
    default: break;
  }
  return hash;
}

// The same, and of all that it waits for, and of how much waits for it. No recursion: graphs can be long.
std::size_t standing(CUgraphNode wanted, std::unordered_map<CUgraphNode, std::size_t>& known) {
  for (List todo{wanted}; !todo.empty();) {
    CUgraphNode const node = todo.back();
    List around;
    std::vector<std::size_t> before;
    if (!dependencies(node, around)) around.clear();
    bool ready = true;
    for (CUgraphNode other : around) {
      const auto found = known.find(other);
      if (found == known.end()) todo.push_back(other);
      if (found != known.end()) before.push_back(found->second);
      ready = ready && found != known.end();
    }
    if (!ready) continue;
    todo.pop_back();
    std::size_t hash = doing(node);
    std::sort(before.begin(), before.end());
    for (const std::size_t one : before) mix(hash, one);
    if (dependents(node, around)) mix(hash, around.size());
    known[node] = hash;
  }
  return known[wanted];
}

}  // namespace

std::unordered_map<CUgraphNode, CUgraphNode> pairs(CUgraph original, CUgraph copy) {
  std::unordered_map<CUgraphNode, CUgraphNode> found;
  const List here = of(original);
  const List there = of(copy);
  for (CUgraphNode node : here) {
    CUgraphNode other = nullptr;
    if (real::cuGraphNodeFindInClone(&other, node, copy) == CUDA_SUCCESS && other != nullptr) found[node] = other;
  }
  if (found.size() == here.size()) return found;
  found.clear();
  if (same_shape(here, there)) {
    for (std::size_t i = 0; i < here.size(); ++i) found[here[i]] = there[i];
    return found;
  }
  std::unordered_map<CUgraphNode, std::size_t> known;
  std::unordered_map<std::size_t, List> ours;
  std::unordered_map<std::size_t, List> theirs;
  for (CUgraphNode node : here) ours[standing(node, known)].push_back(node);
  for (CUgraphNode node : there) theirs[standing(node, known)].push_back(node);
  for (const auto& [hash, list] : ours) {
    const auto other = theirs.find(hash);
    if (list.size() == 1 && other != theirs.end() && other->second.size() == 1) found[list[0]] = other->second[0];
  }
  return found;
}

bool move(CUgraphNode from, CUgraphNode to, std::string& why) {
  switch (type(from)) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return hand_over<CUDA_KERNEL_NODE_PARAMS>(
                 "changing", from, to, [](auto n, auto* v) { return real::cuGraphKernelNodeGetParams_v2(n, v); },
                 [](auto n, auto& v) { return real::cuGraphKernelNodeSetParams_v2(n, &v); }, why) &&
             hand_over_attributes(from, to, why);
    case CU_GRAPH_NODE_TYPE_HOST:
      return hand_over<CUDA_HOST_NODE_PARAMS>(
          "changing", from, to, [](auto n, auto* v) { return real::cuGraphHostNodeGetParams(n, v); },
          [](auto n, auto& v) { return real::cuGraphHostNodeSetParams(n, &v); }, why);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return hand_over<CUevent>(
          "changing", from, to, [](auto n, auto* v) { return real::cuGraphEventRecordNodeGetEvent(n, v); },
          [](auto n, auto& v) { return real::cuGraphEventRecordNodeSetEvent(n, v); }, why);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return hand_over<CUevent>(
          "changing", from, to, [](auto n, auto* v) { return real::cuGraphEventWaitNodeGetEvent(n, v); },
          [](auto n, auto& v) { return real::cuGraphEventWaitNodeSetEvent(n, v); }, why);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return hand_over<CUDA_MEMCPY3D>(
          "changing", from, to, [](auto n, auto* v) { return real::cuGraphMemcpyNodeGetParams(n, v); },
          [](auto n, auto& v) { return real::cuGraphMemcpyNodeSetParams(n, &v); }, why);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return hand_over<CUDA_MEMSET_NODE_PARAMS>(
          "changing", from, to, [](auto n, auto* v) { return real::cuGraphMemsetNodeGetParams(n, v); },
          [](auto n, auto& v) { return real::cuGraphMemsetNodeSetParams(n, &v); }, why);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return hand_over<CUDA_BATCH_MEM_OP_NODE_PARAMS>(
          "changing", from, to, [](auto n, auto* v) { return real::cuGraphBatchMemOpNodeGetParams(n, v); },
          [](auto n, auto& v) { return real::cuGraphBatchMemOpNodeSetParams(n, &v); }, why);
    case CU_GRAPH_NODE_TYPE_EMPTY: return true;
    default: why = std::string("a ") + type_name(from) + " node cannot be moved"; return false;
  }
}

bool replace(CUgraph graph, List& old, const List& fresh, std::string& why) {
  const Places known = places(old);
  List before;
  List after;
  for (CUgraphNode node : old) {
    List around;
    if (!dependencies(node, around)) return why = "edges cannot be read", false;
    for (CUgraphNode other : around) {
      if (!known.contains(other) && std::find(before.begin(), before.end(), other) == before.end()) {
        before.push_back(other);
      }
    }
    if (!dependents(node, around)) return why = "edges cannot be read", false;
    for (CUgraphNode other : around) {
      if (!known.contains(other) && std::find(after.begin(), after.end(), other) == after.end()) after.push_back(other);
    }
  }
  // In the order of their dependencies, whatever the order of the list.
  const Places new_places = places(fresh);
  List made(fresh.size(), nullptr);
  std::vector<bool> leads(fresh.size(), false);
  for (std::size_t left = fresh.size(); left > 0;) {
    const std::size_t tried = left;
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      if (made[i] != nullptr) continue;
      List around;
      if (!dependencies(fresh[i], around)) return why = "edges cannot be read", false;
      List waits;
      bool ready = true;
      bool root = true;
      for (CUgraphNode other : around) {
        const auto place = new_places.find(other);
        if (place == new_places.end()) continue;
        root = false;
        leads[place->second] = true;
        ready = ready && made[place->second] != nullptr;
        waits.push_back(made[place->second]);
      }
      if (!ready) continue;
      if (!add_like(graph, fresh[i], root ? before : waits, made[i], why)) return false;
      --left;
    }
    if (left == tried) return why = "its edges have no order", false;
  }
  List from;
  List to;
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (leads[i]) continue;
    for (CUgraphNode other : after) {
      from.push_back(made[i]);
      to.push_back(other);
    }
  }
  if (!from.empty()) {
    CUresult result = real::cuGraphAddDependencies_v2(graph, from.data(), to.data(), nullptr, from.size());
    if (result == CUDA_ERROR_NOT_SUPPORTED) {
      result = real::cuGraphAddDependencies(graph, from.data(), to.data(), from.size());
    }
    if (result != CUDA_SUCCESS) return why = "cuGraphAddDependencies answered " + std::to_string(result), false;
  }
  for (CUgraphNode node : old) {
    if (failed("removing", node, real::cuGraphDestroyNode(node), why)) return false;
  }
  old = made;
  return true;
}

CUgraph child(CUgraphNode node) {
  CUgraph inner = nullptr;
  if (type(node) != CU_GRAPH_NODE_TYPE_GRAPH) return nullptr;
  return real::cuGraphChildGraphNodeGetGraph(node, &inner) == CUDA_SUCCESS ? inner : nullptr;
}

}  // namespace moorage::graphs::nodes
