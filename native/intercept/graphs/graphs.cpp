#include "graphs.h"

#include <algorithm>
#include <cstdio>
#include <new>

#include "nodes.h"
#include "real.h"

namespace moorage::graphs {

std::atomic<bool> watching{false};

State& state() {
  alignas(State) static unsigned char storage[sizeof(State)];
  static State* const one = new (storage) State;  // never destroyed: threads may call while the process ends
  return *one;
}

Capture::~Capture() {
  if (scratch != nullptr) real::cuGraphDestroy(scratch);
}

Part::~Part() { capture->owner->forget(number); }

std::string text_of(const void* handle) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", handle);
  return text;
}

std::shared_ptr<Graph> find(CUgraph handle) {
  const auto found = state().graphs.find(handle);
  return found == state().graphs.end() ? nullptr : found->second;
}

std::shared_ptr<Graph> find_or_add(CUgraph handle) {
  std::shared_ptr<Graph>& place = state().graphs[handle];
  if (place == nullptr) {
    place = std::make_shared<Graph>();
    place->handle = handle;
  }
  return place;
}

bool holds(const Graph& graph) {
  return !graph.holdings.empty() ||
         std::any_of(graph.inside.begin(), graph.inside.end(), [](const auto& inner) { return holds(*inner.graph); });
}

void each(Graph& graph, const std::function<void(Graph&)>& tell) {
  tell(graph);
  for (const auto& inner : graph.inside) each(*inner.graph, tell);
}

namespace {

void register_nodes(Graph& graph) {
  for (const Holding& one : graph.holdings) {
    for (CUgraphNode node : one.nodes) state().of_nccl[node] = &graph;
  }
}

void forget_nodes(Graph& graph) {
  State& all = state();
  for (const Holding& one : graph.holdings) {
    for (CUgraphNode node : one.nodes) all.of_nccl.erase(node);
  }
  for (CUgraphNode node : graph.known) all.homes.erase(node);
  graph.known.clear();
}

}  // namespace

std::shared_ptr<Graph> copy_parts(const Graph& original, CUgraph copy,
                                  const std::function<CUgraphNode(CUgraphNode)>& counterpart) {
  auto made = find_or_add(copy);
  made->troubles = original.troubles;
  for (const Holding& one : original.holdings) {
    Holding here{one.part, {}};
    for (CUgraphNode node : one.nodes) {
      here.nodes.push_back(counterpart(node));
      if (here.nodes.back() == nullptr) {
        made->troubles.push_back("node " + text_of(node) + " of graph " + text_of(original.handle) +
                                 " was not found in its copy " + text_of(copy));
      }
    }
    made->holdings.push_back(std::move(here));
  }
  register_nodes(*made);
  // Inner graphs: by the nodes that they are in.
  for (CUgraphNode node : nodes::of(original.handle)) {
    CUgraph inner = nodes::child(node);
    const auto known = inner == nullptr ? nullptr : find(inner);
    if (known == nullptr || !holds(*known)) continue;
    CUgraphNode there = counterpart(node);
    CUgraph inner_copy = there == nullptr ? nullptr : nodes::child(there);
    if (inner_copy == nullptr) {
      made->troubles.push_back("child graph node " + text_of(node) + " was not found in its copy " + text_of(copy));
    } else {
      put_inside(*made, there, copy_parts_found(*known, inner_copy));
    }
  }
  return made;
}

std::shared_ptr<Graph> copy_parts_found(const Graph& original, CUgraph copy) {
  const auto pairs = nodes::pairs(original.handle, copy);
  return copy_parts(original, copy, [&](CUgraphNode node) {
    const auto found = pairs.find(node);
    return found == pairs.end() ? nullptr : found->second;
  });
}

void put_inside(Graph& outer, CUgraphNode node, std::shared_ptr<Graph> inner) {
  outer.inside.push_back({node, std::move(inner)});
}

void hold(Graph& graph) {
  if (graph.executables++ > 0 || graph.ours) return;
  graph.known = nodes::all_of(graph.handle);
  for (CUgraphNode node : graph.known) state().homes[node] = &graph;
}

void let_go(std::shared_ptr<Graph> graph, Trash& trash) {
  if (--graph->executables > 0) return;
  for (CUgraphNode node : graph->known) state().homes.erase(node);
  graph->known.clear();
  if (graph->given_up || graph->ours) drop(graph, trash);
}

namespace {

struct Destroyed {
  CUgraph handle;
  explicit Destroyed(CUgraph graph) : handle(graph) {}
  Destroyed(const Destroyed&) = delete;
  Destroyed& operator=(const Destroyed&) = delete;
  ~Destroyed() { real::cuGraphDestroy(handle); }
};

void forget(const std::shared_ptr<Graph>& graph, Trash& trash) {
  for (const auto& inner : graph->inside) forget(inner.graph, trash);
  forget_nodes(*graph);
  std::erase_if(state().bodies, [&](const auto& one) { return one.first == graph->handle || one.second == graph->handle; });
  state().graphs.erase(graph->handle);
  trash.push_back(graph);
}

}  // namespace

// The driver destroys it when the trash is emptied, if it is for us to do.
void drop(const std::shared_ptr<Graph>& graph, Trash& trash) {
  if (graph->given_up || graph->ours) trash.push_back(std::make_shared<Destroyed>(graph->handle));
  forget(graph, trash);
}

void before_change(Graph& graph) {
  if (graph.executables == 0) return;
  CUgraph clone = nullptr;
  const CUresult result = real::cuGraphClone(&clone, graph.handle);
  if (result != CUDA_SUCCESS) {
    const std::string text = "graph " + text_of(graph.handle) +
                             " was changed after an executable was made of it, and cuGraphClone answered " +
                             std::to_string(static_cast<int>(result));
    if (std::find(graph.troubles.begin(), graph.troubles.end(), text) == graph.troubles.end()) {
      graph.troubles.push_back(text);
    }
    return;
  }
  const auto made = copy_parts(graph, clone, [clone](CUgraphNode node) {
    CUgraphNode found = nullptr;
    return real::cuGraphNodeFindInClone(&found, node, clone) == CUDA_SUCCESS ? found : nullptr;
  });
  made->ours = true;
  for (Exec* exec : state().order) {
    if (exec->base.get() != &graph) continue;
    // From now on its nodes are found by those of the job.
    std::unordered_map<CUgraphNode, CUgraphNode> pairs;
    const nodes::List known = exec->pairs.empty() ? nodes::of(graph.handle) : nodes::List();
    for (CUgraphNode node : known) pairs[node] = node;
    for (const auto& [job, base] : exec->pairs) pairs[job] = base;
    for (auto& [job, base] : pairs) {
      CUgraphNode found = nullptr;
      base = real::cuGraphNodeFindInClone(&found, base, clone) == CUDA_SUCCESS ? found : nullptr;
    }
    exec->pairs = std::move(pairs);
    exec->base = made;
    ++made->executables;
  }
  graph.executables = 0;
  for (CUgraphNode node : graph.known) state().homes.erase(node);
  graph.known.clear();
}

void tell_troubles(const Graph& graph, const std::function<void(const std::string&)>& tell) {
  for (const std::string& text : graph.troubles) tell(text);
  for (const auto& inner : graph.inside) tell_troubles(*inner.graph, tell);
}

void changes_slowly(CUgraph handle) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (const auto graph = find(handle)) before_change(*graph);
}

void changes_slowly(CUgraphNode node) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (const auto home = all.homes.find(node); home != all.homes.end()) before_change(*home->second);
  if (const auto nccl = all.of_nccl.find(node); nccl != all.of_nccl.end()) {
    nccl->second->troubles.push_back(std::string("the job changed ") + nodes::type_name(node) + " node " +
                                     text_of(node) + " of graph " + text_of(nccl->second->handle) +
                                     ", which NCCL added");
  }
}

}  // namespace moorage::graphs
