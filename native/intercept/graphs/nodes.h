// Nodes of CUDA graphs: what they are, how one takes over what another one does.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../cuda_api.h"

namespace moorage::graphs::nodes {

using List = std::vector<CUgraphNode>;

List of(CUgraph graph);
// Those of child graphs as well.
List all_of(CUgraph graph);
CUgraphNodeType type(CUgraphNode node);
const char* type_name(CUgraphNode node);
// Can a node of this type take over what another one does?
bool movable(CUgraphNode node);
// Node for node of the same types, with the same edges among each other?
bool same_shape(const List& one, const List& other);
// Which node of `copy` stands for which node of the graph that it was made of, as the driver says, or by what each does
// and waits for. Nodes for which that is not certain are left out.
std::unordered_map<CUgraphNode, CUgraphNode> pairs(CUgraph original, CUgraph copy);
// `to` does from now on what `from` does. False, and why.
bool move(CUgraphNode from, CUgraphNode to, std::string& why);
// In `graph`, nodes like `fresh` take the place of `old`, which go. False, and why.
bool replace(CUgraph graph, List& old, const List& fresh, std::string& why);
// The graph within a child graph node; null: it is none.
CUgraph child(CUgraphNode node);

}  // namespace moorage::graphs::nodes
