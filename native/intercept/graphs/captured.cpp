// Which nodes a call of NCCL added, and the objects through which NCCL learns that its graphs are gone.
#include <algorithm>

#include "captures.h"
#include "driver.h"
#include "graphs.h"
#include "hooks.h"
#include "nodes.h"
#include "real.h"

namespace moorage::graphs {
namespace {

// ---- user objects, with a lock of their own: the driver may end them while it does something else

struct Objects {
  std::mutex mutex;
  std::unordered_map<CUuserObject, std::shared_ptr<UserObject>> living;
};
Objects& objects() {
  static auto* const one = new Objects;
  return *one;
}

struct Wrapped {
  std::shared_ptr<UserObject> object;
  CUuserObject handle = nullptr;
};

void ended(void* data) {
  auto* const wrapped = static_cast<Wrapped*>(data);
  {
    Objects& all = objects();
    const std::lock_guard lock(all.mutex);
    const auto found = all.living.find(wrapped->handle);
    if (found != all.living.end() && found->second == wrapped->object) all.living.erase(found);
  }
  wrapped->object->run();
  delete wrapped;
}

// ---- looks

struct Look {
  CUgraph graph = nullptr;
  nodes::List before;  // sorted
  std::vector<std::shared_ptr<UserObject>> objects;
};
struct Looks {
  std::mutex mutex;
  std::vector<Look*> all;
};
Looks& looks() {
  static auto* const one = new Looks;
  return *one;
}
std::atomic<unsigned> looking{0};
std::atomic<std::size_t> open_captures{0};

}  // namespace

CUgraph capture_of(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  CUresult result = real::cuStreamGetCaptureInfo_v2(stream, &status, &id, &graph, nullptr, nullptr);
  if (result == CUDA_ERROR_NOT_SUPPORTED) {
    result = real::cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, nullptr, nullptr, nullptr);
  }
  return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : nullptr;
}

namespace {

nodes::List end_look(Look& look) {
  {
    Looks& all = looks();
    const std::lock_guard lock(all.mutex);
    std::erase(all.all, &look);
    --looking;
  }
  nodes::List added = nodes::of(look.graph);
  std::erase_if(added, [&](CUgraphNode node) {
    return std::binary_search(look.before.begin(), look.before.end(), node);
  });
  return added;
}

void* graph_of(void* stream) { return capture_of(static_cast<CUstream>(stream)); }

void* begin_look(void* graph) {
  watching.store(true);
  auto* const look = new Look;
  look->graph = static_cast<CUgraph>(graph);
  look->before = nodes::of(look->graph);
  std::sort(look->before.begin(), look->before.end());
  Looks& all = looks();
  const std::lock_guard lock(all.mutex);
  all.all.push_back(look);
  ++looking;
  return look;
}

std::uint64_t captured(void* handle, const Owner* owner, bool kept) {
  const std::unique_ptr<Look> look(static_cast<Look*>(handle));
  nodes::List added = end_look(*look);
  if (!kept || (added.empty() && look->objects.empty())) return 0;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto graph = find_or_add(look->graph);
  if (!graph->open) {
    graph->open = true;
    ++open_captures;
  }
  auto part = std::make_shared<Part>();
  part->number = ++all.numbers;
  part->objects = std::move(look->objects);
  std::shared_ptr<Capture>& session = graph->sessions[owner];
  if (session == nullptr) {
    session = std::make_shared<Capture>();
    session->number = ++all.numbers;
    session->owner = owner;
    all.captures[session->number] = session;
  }
  part->capture = session;
  part->capture->parts.push_back(part);
  all.parts[part->number] = part;
  for (CUgraphNode node : added) {
    all.of_nccl[node] = graph.get();
    if (!nodes::movable(node)) {
      graph->troubles.push_back("graph " + text_of(look->graph) + ": NCCL added " + nodes::type_name(node) + " node " +
                                text_of(node) + ", which cannot take over another call");
    }
  }
  if (all.bodies.contains(look->graph)) {
    graph->troubles.push_back("graph " + text_of(look->graph) + " is the body of a conditional node: how often " +
                              nodes::type_name(added.empty() ? nullptr : added.front()) + " node " +
                              text_of(added.empty() ? nullptr : added.front()) + " runs cannot be counted");
  }
  graph->holdings.push_back({part, std::move(added)});
  return part->number;
}

void again(void* handle, std::uint64_t number) {
  const std::unique_ptr<Look> look(static_cast<Look*>(handle));
  nodes::List added = end_look(*look);
  std::shared_ptr<Part> part;  // its end must not come under the lock
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.parts.find(number);
  if (found != all.parts.end()) part = found->second.lock();
  if (part == nullptr) return;
  part->fresh = std::move(added);
  part->objects = std::move(look->objects);
}

std::size_t open() { return open_captures.load(); }

void refusals(const Owner* owner, void* context, void (*tell)(void*, std::uint64_t, const char*)) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto part_of = [owner](auto& graph) {
    std::uint64_t part = 0;
    each(graph, [&](Graph& one) {
      for (const Holding& holding : one.holdings) {
        if (part == 0 && holding.part->capture->owner == owner) part = holding.part->number;
      }
    });
    return part;
  };
  std::vector<std::string> said;
  const auto say = [&](std::uint64_t part, const std::string& text) {
    if (part == 0 || std::find(said.begin(), said.end(), text) != said.end()) return;
    said.push_back(text);
    tell(context, part, text.c_str());
  };
  for (const auto& [handle, graph] : all.graphs) {
    const std::uint64_t part = part_of(*graph);
    tell_troubles(*graph, [&](const std::string& text) { say(part, text); });
  }
  for (Exec* exec : all.order) {
    const std::uint64_t part = part_of(*exec);
    tell_troubles(*exec->base, [&](const std::string& text) { say(part, text); });
    for (const std::string& text : exec->troubles) say(part, text);
  }
  for (const auto& [handle, text] : all.foreign) tell(context, 0, text.c_str());
}

}  // namespace

void after_end(CUgraph handle, bool well) {
  if (handle == nullptr || open_captures.load() == 0) return;
  Trash trash;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto graph = find(handle);
  if (graph == nullptr || !graph->open) return;
  graph->open = false;
  graph->sessions.clear();
  --open_captures;
  if (!well) drop(graph, trash);
}

// In again.cpp.
void release(const Owner* owner);
void captures(const Owner* owner, void* context,
              void (*tell)(void*, std::uint64_t, const std::uint64_t*, std::size_t));
bool renew(std::uint64_t capture, void* graph, char* why, std::size_t size);
void lose(std::uint64_t capture);
bool instantiate(const Owner* owner, char* why, std::size_t size);

}  // namespace moorage::graphs

extern "C" __attribute__((visibility("default"))) const moorage::graphs::Table moorage_graphs = {
    .version = moorage::graphs::kVersion,
    .graph_of = moorage::graphs::graph_of,
    .look = moorage::graphs::begin_look,
    .captured = moorage::graphs::captured,
    .again = moorage::graphs::again,
    .open = moorage::graphs::open,
    .refusals = moorage::graphs::refusals,
    .release = moorage::graphs::release,
    .captures = moorage::graphs::captures,
    .renew = moorage::graphs::renew,
    .lose = moorage::graphs::lose,
    .instantiate = moorage::graphs::instantiate,
};

namespace moorage::hook {

CUresult cuUserObjectCreate(CUuserObject* out, void* data, CUhostFn destroy, unsigned count, unsigned flags) {
  using namespace graphs;
  if (out == nullptr || destroy == nullptr) return real::cuUserObjectCreate(out, data, destroy, count, flags);
  auto* const wrapped = new Wrapped{std::make_shared<UserObject>(destroy, data)};
  Objects& all = objects();
  const std::lock_guard lock(all.mutex);
  const CUresult result = real::cuUserObjectCreate(out, wrapped, ended, count, flags);
  if (result != CUDA_SUCCESS) {
    delete wrapped;
    return result;
  }
  wrapped->handle = *out;
  all.living[*out] = wrapped->object;
  return result;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  using namespace graphs;
  std::shared_ptr<UserObject> known;
  if (looking.load() > 0) {
    Objects& all = objects();
    const std::lock_guard lock(all.mutex);
    const auto found = all.living.find(object);
    if (found != all.living.end()) known = found->second;
  }
  const CUresult result = real::cuGraphRetainUserObject(graph, object, count, flags);
  if (result == CUDA_SUCCESS && known != nullptr) {
    Looks& all = looks();
    const std::lock_guard lock(all.mutex);
    for (Look* look : all.all) {
      if (look->graph == graph) look->objects.push_back(known);
    }
  }
  return result;
}

}  // namespace moorage::hook
