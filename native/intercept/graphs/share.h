// What the libcuda proxy does for a libnccl proxy of the same process: the address of one Table is its exported symbol
// `moorage_graphs`. Both are built from this file; `version` says whether they understand each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moorage::graphs {

inline constexpr std::uint32_t kVersion = 1;
inline constexpr char kSymbol[] = "moorage_graphs";

// A libnccl proxy. It lives as long as the process. A part is one call of NCCL, or a group, that was captured.
struct Owner {
  // A graph with these parts is about to be launched; may wait. What it answers is given to `launched`.
  void* (*launching)(const std::uint64_t* parts, std::size_t count, void* stream);
  void (*launched)(void* launch);
  // No graph and no executable holds this part any more.
  void (*forget)(std::uint64_t part);
};

struct Table {
  std::uint32_t version;

  // The graph into which a stream is captured; null: none.
  void* (*graph_of)(void* stream);
  // Look at the nodes that this graph has: what is added until the look ends belongs to the call in between.
  void* (*look)(void* graph);
  // Ends a look. The number of the part; 0: nothing was added. `kept` false: the call failed, and nothing is kept.
  std::uint64_t (*captured)(void* look, const Owner* owner, bool kept);
  // Ends a look at a new capture of the part.
  void (*again)(void* look, std::uint64_t part);

  // How many captures with parts have not ended.
  std::size_t (*open)();
  // What cannot be carried over: a part of it, and the reason, which names graph and node.
  void (*refusals)(const Owner* owner, void* context, void (*tell)(void* context, std::uint64_t part, const char* why));

  // Teardown: run, once, what NCCL wants to be told when the graphs of its parts are gone.
  void (*release)(const Owner* owner);
  // Rebuild: the captures, oldest first, each with its parts in their order. Each is captured again as a whole.
  void (*captures)(const Owner* owner, void* context,
                   void (*tell)(void* context, std::uint64_t capture, const std::uint64_t* parts, std::size_t count));
  // This graph has all parts of the capture again; it is the proxy's from now on. False, and why.
  bool (*renew)(std::uint64_t capture, void* graph, char* why, std::size_t size);
  // A capture that cannot be made again, because a communicator has no partners any more: launching it fails.
  void (*lose)(std::uint64_t capture);
  // All captures of this owner are renewed: make executables anew. False, and why.
  bool (*instantiate)(const Owner* owner, char* why, std::size_t size);
};

}  // namespace moorage::graphs
