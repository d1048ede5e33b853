// Teardown and rebuild: NCCL is told that its graphs are gone, and its calls, captured again, take their place.
#include <algorithm>
#include <cstdio>
#include <set>

#include "graphs.h"
#include "nodes.h"
#include "real.h"

namespace moorage::graphs {
namespace {

bool say(char* why, std::size_t size, const std::string& text) {
  std::snprintf(why, size, "%s", text.c_str());
  return false;
}

bool of_owner(const Part& part, const Owner* owner) { return part.capture->owner == owner; }

// Node by node, or as a whole where NCCL does it in another way now.
bool renew_holding(Graph& graph, Holding& holding, std::string& why) {
  const nodes::List& fresh = holding.part->fresh;
  if (nodes::same_shape(holding.nodes, fresh)) {
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      if (!nodes::move(fresh[i], holding.nodes[i], why)) return false;
    }
    return true;
  }
  State& all = state();
  for (CUgraphNode node : holding.nodes) all.of_nccl.erase(node);
  if (!nodes::replace(graph.handle, holding.nodes, fresh, why)) return false;
  for (CUgraphNode node : holding.nodes) all.of_nccl[node] = &graph;
  return true;
}

bool stale(Exec& exec) {
  bool found = false;
  each(exec, [&](Graph& graph) {
    for (const Holding& one : graph.holdings) found = found || one.part->stale;
  });
  return found;
}

CUresult make_anew(Exec& exec) {
  real::cuGraphExecDestroy(exec.real);
  exec.real = nullptr;
  if (exec.context != nullptr) real::cuCtxSetCurrent(exec.context);
  CUgraphExec made = nullptr;
  const CUresult result = real::cuGraphInstantiateWithFlags(&made, exec.base->handle, exec.flags);
  if (result == CUDA_SUCCESS) exec.real = made;
  return result;
}

}  // namespace

void release(const Owner* owner);
void release(const Owner* owner) {
  std::vector<std::shared_ptr<UserObject>> told;
  {
    Trash trash;
    State& all = state();
    const std::lock_guard lock(all.mutex);
    for (const auto& [number, weak] : all.parts) {
      const auto part = weak.lock();
      trash.push_back(part);
      if (part == nullptr || !of_owner(*part, owner)) continue;
      part->stale = true;
      told.insert(told.end(), part->objects.begin(), part->objects.end());
      part->objects.clear();
    }
    for (Exec* exec : all.order) exec->stale = exec->stale || stale(*exec);
  }
  for (const auto& object : told) object->run();
}

void captures(const Owner* owner, void* context, void (*tell)(void*, std::uint64_t, const std::uint64_t*, std::size_t));
void captures(const Owner* owner, void* context,
              void (*tell)(void*, std::uint64_t, const std::uint64_t*, std::size_t)) {
  std::vector<std::pair<std::uint64_t, std::vector<std::uint64_t>>> found;
  {
    Trash trash;
    State& all = state();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.captures, [](const auto& one) { return one.second.expired(); });
    std::erase_if(all.parts, [](const auto& one) { return one.second.expired(); });
    for (const auto& [number, weak] : all.captures) {
      const auto capture = weak.lock();
      if (capture == nullptr || capture->owner != owner || capture->lost) continue;
      trash.push_back(capture);
      std::vector<std::uint64_t> parts;
      for (const auto& one : capture->parts) {
        if (const auto part = one.lock()) {
          parts.push_back(part->number);
          trash.push_back(part);
        }
      }
      if (!parts.empty()) found.emplace_back(number, std::move(parts));
    }
  }
  for (const auto& [number, parts] : found) tell(context, number, parts.data(), parts.size());
}

bool renew(std::uint64_t number, void* graph, char* why, std::size_t size);
bool renew(std::uint64_t number, void* graph, char* why, std::size_t size) {
  Trash trash;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.captures.find(number);
  const auto capture = found == all.captures.end() ? nullptr : found->second.lock();
  auto* const scratch = static_cast<CUgraph>(graph);
  if (capture == nullptr) {
    // The job gave the last graph up meanwhile.
    real::cuGraphDestroy(scratch);
    return true;
  }
  trash.push_back(capture);
  std::string text;
  for (const auto& [handle, one] : all.graphs) {
    for (Holding& holding : one->holdings) {
      if (holding.part->capture != capture) continue;
      if (renew_holding(*one, holding, text)) continue;
      return say(why, size, "graph " + text_of(handle) + ": " + text);
    }
  }
  for (const auto& weak : capture->parts) {
    const auto part = weak.lock();
    if (part == nullptr) continue;
    part->stale = false;
    part->fresh.clear();
    trash.push_back(part);
  }
  // The old one's nodes are no longer needed by anybody.
  if (CUgraph old = std::exchange(capture->scratch, scratch)) real::cuGraphDestroy(old);
  return true;
}

void lose(std::uint64_t number);
void lose(std::uint64_t number) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.captures.find(number);
  if (found == all.captures.end()) return;
  if (const auto capture = found->second.lock()) capture->lost = true;
}

bool instantiate(const Owner* owner, char* why, std::size_t size);
bool instantiate(const Owner* owner, char* why, std::size_t size) {
  CUcontext before = nullptr;
  real::cuCtxGetCurrent(&before);
  State& all = state();
  const std::lock_guard lock(all.mutex);
  bool well = true;
  for (Exec* exec : all.order) {
    if (!well || !exec->stale || stale(*exec)) continue;  // of another owner, or lost
    const std::string name = "graph " + text_of(exec->base->handle);
    if (const CUresult result = make_anew(*exec); result != CUDA_SUCCESS) {
      well = say(why, size, name + " was not instantiated again: error " + std::to_string(static_cast<int>(result)));
      continue;
    }
    for (const Update& update : exec->updates) {
      const CUresult result = update.replay(exec->real, counterpart(*exec, update.node));
      if (result == CUDA_SUCCESS) continue;
      well = say(why, size, name + ": an update of node " + text_of(update.node) + " cannot be made again: error " +
                                std::to_string(static_cast<int>(result)));
    }
    exec->stale = !well;
  }
  (void)owner;
  real::cuCtxSetCurrent(before);
  return well;
}

}  // namespace moorage::graphs
