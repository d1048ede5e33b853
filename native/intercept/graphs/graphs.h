// CUDA graphs that hold what NCCL captured. docs/nccl-graphs.md says how they are carried over.
//
// Graphs without such nodes are none of this file's business: while `watching` is false nothing here costs more than
// one load.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../cuda_api.h"
#include "share.h"

namespace moorage::graphs {

extern std::atomic<bool> watching;  // NCCL captured something in this process

// ---- what NCCL captured

// A destructor that the driver is to run when no graph needs it any more; here it runs at most once.
class UserObject {
 public:
  UserObject(CUhostFn destroy, void* data) : destroy_(destroy), data_(data) {}
  void run() {
    if (!done_.exchange(true)) destroy_(data_);
  }

 private:
  CUhostFn destroy_;
  void* data_;
  std::atomic<bool> done_{false};
};

struct Part;

// The calls of one owner that were captured into one graph: they are captured again together, in the same order,
// because NCCL adds other nodes for the first call of a capture than for the next ones.
struct Capture {
  std::uint64_t number = 0;
  const Owner* owner = nullptr;
  std::vector<std::weak_ptr<Part>> parts;
  CUgraph scratch = nullptr;  // of the last new capture: its nodes keep what theirs were copied to alive
  bool lost = false;
  Capture() = default;
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture();
};

struct Part {
  std::uint64_t number = 0;
  std::shared_ptr<Capture> capture;
  std::vector<std::shared_ptr<UserObject>> objects;
  std::vector<CUgraphNode> fresh;  // during a rebuild: the nodes in the new capture
  bool stale = false;              // its communicator is gone, and it was not captured again
  Part() = default;
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  ~Part();
};

// A part's nodes in one graph, in the order in which they were added.
struct Holding {
  std::shared_ptr<Part> part;
  std::vector<CUgraphNode> nodes;
};

struct Graph {
  CUgraph handle = nullptr;
  std::vector<Holding> holdings;
  struct Inner {
    CUgraphNode node;  // the child graph node, or the conditional one
    std::shared_ptr<Graph> graph;
  };
  std::vector<Inner> inside;
  std::map<const Owner*, std::shared_ptr<Capture>> sessions;  // while it is captured
  bool open = false;                                          // being captured
  bool given_up = false;  // the job destroyed it, but executables are made of it
  bool ours = false;      // a clone that the job does not know
  unsigned executables = 0;
  std::vector<std::string> troubles;
  std::vector<CUgraphNode> known;  // while there are executables: all nodes, of inner graphs as well
};

// An update of an executable that the job made, to be made again.
struct Update {
  CUgraphNode node = nullptr;  // of the graph that the job knows
  int kind = 0;
  std::function<CUresult(CUgraphExec, CUgraphNode)> replay;
};

// What the job holds in its hands as CUgraphExec.
struct Exec {
  CUgraphExec real = nullptr;
  std::shared_ptr<Graph> base;
  cuuint64_t flags = 0;
  CUcontext context = nullptr;
  std::vector<Update> updates;
  std::unordered_map<CUgraphNode, CUgraphNode> pairs;  // after an update by a graph: from the job's nodes to its nodes
  bool unpaired = false;
  std::unordered_map<CUgraphNode, std::shared_ptr<Graph>> children;  // by an update, for that node of the job's
  std::vector<std::string> troubles;
  bool stale = false;  // its nodes are those of communicators that are gone

  struct Share {
    const Owner* owner;
    std::vector<std::uint64_t> parts;
  };
  std::shared_ptr<const std::vector<Share>> shares;
};

struct State {
  std::mutex mutex;  // of all that follows
  std::unordered_map<CUgraph, std::shared_ptr<Graph>> graphs;
  std::unordered_set<Exec*> executables;
  std::vector<Exec*> order;                          // as they were made
  std::unordered_map<CUgraphNode, Graph*> homes;     // nodes of graphs with executables, and all of NCCL's
  std::unordered_map<CUgraphNode, Graph*> of_nccl;
  std::unordered_map<CUgraph, CUgraph> bodies;       // of conditional nodes: the graph they are in
  std::map<CUgraphExec, std::string> foreign;        // with real handles, but nodes of NCCL: why that is refused
  std::map<std::uint64_t, std::weak_ptr<Capture>> captures;
  std::map<std::uint64_t, std::weak_ptr<Part>> parts;
  std::uint64_t numbers = 0;
};
State& state();

// Things that must end when the lock is no longer held: their ends call the driver and the owner.
using Trash = std::vector<std::shared_ptr<void>>;

// ---- graphs, under the lock

std::shared_ptr<Graph> find(CUgraph handle);
std::shared_ptr<Graph> find_or_add(CUgraph handle);
bool holds(const Graph& graph);  // parts, in itself or inside
void each(Graph& graph, const std::function<void(Graph&)>& tell);  // itself and all inside
// `copy` is a new graph that was made of `original`, whose nodes answer for the original's as `counterpart` says.
std::shared_ptr<Graph> copy_parts(const Graph& original, CUgraph copy,
                                  const std::function<CUgraphNode(CUgraphNode)>& counterpart);
// The same where it has to be found out which node is which; what is not certain is a trouble of the copy.
std::shared_ptr<Graph> copy_parts_found(const Graph& original, CUgraph copy);
// `inner` became part of `outer`.
void put_inside(Graph& outer, CUgraphNode node, std::shared_ptr<Graph> inner);
// An executable is made of the graph, or no longer.
void hold(Graph& graph);
void let_go(std::shared_ptr<Graph> graph, Trash& trash);
void drop(const std::shared_ptr<Graph>& graph, Trash& trash);
// The graph is about to change: executables that are made of it go on with a clone.
void before_change(Graph& graph);

// ---- executables, under the lock

Exec* exec_of(CUgraphExec handle);  // null: the driver's own
void share_out(Exec& exec);
CUgraphNode counterpart(Exec& exec, CUgraphNode node);
void drop_children(Exec& exec, Trash& trash);
void tell_troubles(const Graph& graph, const std::function<void(const std::string&)>& tell);

// All graphs of which the executable is made: what updates replaced is left out.
void each(Exec& exec, const std::function<void(Graph&)>& tell);

// ---- captures

// The graph into which this stream is captured; null: none.
CUgraph capture_of(CUstream stream);
// The capture into this graph has ended; not well: there is no graph.
void after_end(CUgraph graph, bool well);

// ---- for the generated functions

void changes_slowly(CUgraph graph);
void changes_slowly(CUgraphNode node);
template <typename Handle>
inline void changes(Handle handle) {
  if (watching.load(std::memory_order_relaxed)) [[unlikely]] changes_slowly(handle);
}

// The driver's handle of an executable, which stays what it is meanwhile.
class Using {
 public:
  explicit Using(CUgraphExec handle);
  CUgraphExec real() const { return real_; }

 private:
  std::unique_lock<std::mutex> lock_;
  CUgraphExec real_;
};

std::string text_of(const void* handle);

}  // namespace moorage::graphs
