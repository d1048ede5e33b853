// CUDA graphs that captured calls of NCCL live on over a teardown and rebuild of their communicators: two ranks in one
// process, both proxies, a driver and an NCCL without a GPU. The fakes end the process when a node of a communicator
// that is gone runs, and NCCL's destroy waits for its graphs.
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "api.h"
#include "host.h"

using moorage::nccl::UniqueId;

extern "C" {
int ncclGetUniqueId(UniqueId*);
int ncclCommInitRank(void**, int, UniqueId, int);
int ncclCommDestroy(void*);
int ncclAllReduce(const void*, void*, std::size_t, int, int, void*, void*);
int ncclRedOpCreatePreMulSum(int*, void*, int, int, void*);
int ncclRedOpDestroy(int, void*);
int ncclSend(const void*, std::size_t, int, int, void*, void*);
int ncclRecv(void*, std::size_t, int, int, void*, void*);
int ncclGroupStart();
int ncclGroupEnd();
}

namespace {

constexpr int kInt64 = 4;
#define OK(call) CHECK(static_cast<int>(call) == 0)

struct Rank {
  int number = 0;
  void* comm = nullptr;
  void* second = nullptr;
  CUstream stream = nullptr;
  CUstream side = nullptr;
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::int64_t got = 0;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  std::atomic<int>* counter = nullptr;
};
using Ranks = std::vector<Rank>;

CUcontext context = nullptr;

void together(Ranks& ranks, const std::function<void(Rank&)>& work) {
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    threads.emplace_back([&] {
      OK(cuCtxSetCurrent(context));
      work(rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

void join(Ranks& ranks, void* Rank::*place) {
  UniqueId id{};
  OK(ncclGetUniqueId(&id));
  together(ranks, [&](Rank& rank) { OK(ncclCommInitRank(&(rank.*place), 2, id, rank.number)); });
}

Ranks fresh(Ranks& like) {
  Ranks made(2);
  for (std::size_t i = 0; i < 2; ++i) {
    made[i].number = like[i].number;
    made[i].comm = like[i].comm;
    made[i].second = like[i].second;
    OK(cuStreamCreate(&made[i].stream, 0));
    OK(cuStreamCreate(&made[i].side, 0));
  }
  return made;
}

void sum(Rank& rank, void* comm = nullptr, int reduction = 0) {
  OK(ncclAllReduce(&rank.in, &rank.out, 1, kInt64, reduction, comm == nullptr ? rank.comm : comm, rank.stream));
}

void capture(Rank& rank, const std::function<void(Rank&)>& body) {
  OK(cuStreamBeginCapture_v2(rank.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  body(rank);
  OK(cuStreamEndCapture(rank.stream, &rank.graph));
}

void make(Rank& rank, unsigned long long flags = 0) { OK(cuGraphInstantiateWithFlags(&rank.exec, rank.graph, flags)); }

void replay(Ranks& ranks, std::int64_t value, std::int64_t expected) {
  together(ranks, [&](Rank& rank) {
    rank.in = value + rank.number;
    OK(cuGraphUpload(rank.exec, rank.stream));
    OK(cuGraphLaunch(rank.exec, rank.stream));
    OK(cuStreamSynchronize(rank.stream));
    CHECK(rank.out == expected);
  });
}

void end(Ranks& ranks, bool graph = true) {
  for (Rank& rank : ranks) {
    if (graph) OK(cuGraphDestroy(rank.graph));
    OK(cuGraphExecDestroy(rank.exec));
  }
}

std::vector<std::string> ready(const Report& report) {
  std::map<std::string, int> members;
  for (const Handle& handle : report.handles) members[handle.communicator] += handle.state == 1 ? 1 : 100;
  std::vector<std::string> names;
  for (const auto& [name, count] : members) {
    if (count == 2) names.push_back(name);
  }
  return names;
}

// The whole way: everything is gone, and there again.
void over(Host& host) {
  CHECK(host.refusals().empty());
  host.order(Host::Cut);
  const Report last = until(host, Host::Drain, [](const Report& report) { return report.undrained.empty(); });
  const std::string why = host.teardown();
  if (!why.empty()) std::fprintf(stderr, "teardown: %s\n", why.c_str());
  CHECK(why.empty());
  host.part();
  CHECK(host.greet());
  const std::string bad = host.rebuild(ready(last));
  if (!bad.empty()) std::fprintf(stderr, "rebuild: %s\n", bad.c_str());
  CHECK(bad.empty());
  CHECK(!host.order(Host::Open).stale);
  ++host.attempt;
  host.round = 0;
}

bool refused(Host& host, const char* text) {
  const auto found = host.reasons();
  const bool well = found.size() == 1 && found[0].find(text) != std::string::npos;
  if (!well) {
    for (const std::string& one : found) std::fprintf(stderr, "refused: %s\n", one.c_str());
  }
  return well;
}

CUgraphNode first_of(CUgraph graph, CUgraphNodeType wanted) {
  std::size_t count = 0;
  OK(cuGraphGetNodes(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  OK(cuGraphGetNodes(graph, nodes.data(), &count));
  for (CUgraphNode node : nodes) {
    CUgraphNodeType type{};
    OK(cuGraphNodeGetType(node, &type));
    if (type == wanted) return node;
  }
  CHECK(!"a node of that type");
  std::abort();
}

// ---- what is carried over

void plain(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  together(ranks, [](Rank& rank) {
    capture(rank, [](Rank& one) { sum(one); });
    make(rank);
  });
  for (int round = 0; round < 3; ++round) {
    replay(ranks, 10 * round, 20 * round + 1);
    replay(ranks, 5, 11);
    over(host);
  }
  replay(ranks, 7, 15);
  cuuint64_t flags = 9;
  OK(cuGraphExecGetFlags(ranks[0].exec, &flags));
  CHECK(flags == 0);
  end(ranks);
}

// Several calls, a group, two communicators, two streams; the graph is destroyed before the executable.
void several(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  std::int64_t factor = 10;
  together(ranks, [&](Rank& rank) {
    CUevent fork = nullptr;
    CUevent back = nullptr;
    OK(cuEventCreate(&fork, 0));
    OK(cuEventCreate(&back, 0));
    capture(rank, [&](Rank& one) {
      int reduction = 0;
      OK(ncclRedOpCreatePreMulSum(&reduction, &factor, kInt64, 1, one.comm));
      OK(cuEventRecord(fork, one.stream));
      OK(cuStreamWaitEvent(one.side, fork, 0));
      sum(one, nullptr, reduction);
      OK(ncclRedOpDestroy(reduction, one.comm));
      OK(ncclGroupStart());
      OK(ncclSend(&one.out, 1, kInt64, 1 - one.number, one.second, one.side));
      OK(ncclRecv(&one.got, 1, kInt64, 1 - one.number, one.second, one.side));
      OK(ncclGroupEnd());
      OK(cuEventRecord(back, one.side));
      OK(cuStreamWaitEvent(one.stream, back, 0));
      OK(ncclAllReduce(&one.got, &one.out, 1, kInt64, 0, one.second, one.stream));
      OK(ncclAllReduce(&one.out, &one.out, 1, kInt64, 0, one.comm, one.stream));
    });
    make(rank, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    OK(cuGraphDestroy(rank.graph));
  });
  replay(ranks, 1, 120);
  over(host);
  replay(ranks, 2, 200);
  // What is counted is what was captured.
  const Report before = host.order(Host::Open);
  replay(ranks, 3, 280);
  const Report after = host.order(Host::Open);
  std::int64_t collectives = 0;
  std::int64_t sends = 0;
  for (const Lane& lane : after.admitted) {
    const auto more = lane.count - before.count(lane.communicator, static_cast<int>(lane.member),
                                                static_cast<int>(lane.kind), static_cast<int>(lane.peer));
    (lane.kind == 0 ? collectives : sends) += more;
  }
  CHECK(collectives == 6 && sends == 4);
  over(host);
  replay(ranks, 4, 360);
  end(ranks, false);
}

// NCCL does it in another way after the rebuild.
void another_shape(Host& host, Ranks& all) {
  void* const fake = dlopen(std::getenv("MOORAGE_REAL_LIBNCCL"), RTLD_NOW | RTLD_NOLOAD);
  CHECK(fake != nullptr);
  auto* const kernels = reinterpret_cast<void (*)(int)>(dlsym(fake, "fakeNcclKernels"));
  CHECK(kernels != nullptr);
  Ranks ranks = fresh(all);
  std::atomic<int> seen{0};
  together(ranks, [&](Rank& rank) {
    capture(rank, [&](Rank& one) {
      OK(cuLaunchHostFunc(one.stream, [](void* data) { ++*static_cast<std::atomic<int>*>(data); }, &seen));
      sum(one);
      OK(cuLaunchHostFunc(one.stream, [](void* data) { ++*static_cast<std::atomic<int>*>(data); }, &seen));
      sum(one);
    });
    make(rank);
  });
  kernels(3);
  over(host);
  replay(ranks, 1, 3);
  kernels(1);
  over(host);
  replay(ranks, 2, 5);
  CHECK(seen == 8);
  end(ranks);
}

// Graphs that allocate memory can neither be cloned nor be instantiated twice.
void memory(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  together(ranks, [](Rank& rank) {
    capture(rank, [](Rank& one) { sum(one); });
    CUDA_MEM_ALLOC_NODE_PARAMS params{};
    CUgraphNode node = nullptr;
    OK(cuGraphAddMemAllocNode(&node, rank.graph, nullptr, 0, &params));
    make(rank);
    OK(cuGraphDestroy(rank.graph));
  });
  over(host);
  replay(ranks, 1, 3);
  over(host);
  replay(ranks, 2, 5);
  end(ranks, false);
}

// In a child graph; in a clone. A launch cannot be captured.
void copies(Host& host, Ranks& all) {
  for (const int how : {0, 1}) {
    Ranks ranks = fresh(all);
    together(ranks, [how](Rank& rank) {
      capture(rank, [](Rank& one) { sum(one); });
      CUgraph inner = rank.graph;
      if (how == 0) {
        CUgraphNode node = nullptr;
        OK(cuGraphCreate(&rank.graph, 0));
        OK(cuGraphAddChildGraphNode(&node, rank.graph, nullptr, 0, inner));
      } else {
        OK(cuGraphClone(&rank.graph, inner));
        CUgraphExec launched = nullptr;
        CUgraph empty = nullptr;
        OK(cuGraphInstantiateWithFlags(&launched, inner, 0));
        OK(cuStreamBeginCapture_v2(rank.side, CU_STREAM_CAPTURE_MODE_RELAXED));
        CHECK(cuGraphLaunch(launched, rank.side) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        OK(cuStreamEndCapture(rank.side, &empty));
        OK(cuGraphExecDestroy(launched));
        OK(cuGraphDestroy(empty));
      }
      OK(cuGraphDestroy(inner));
      make(rank);
    });
    replay(ranks, 1, 3);
    over(host);
    replay(ranks, 2, 5);
    over(host);
    replay(ranks, 3, 7);
    end(ranks);
  }
}

// ---- what the job does to graphs and executables afterwards

void updates(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  std::atomic<int> first{0};
  std::atomic<int> second{0};
  const auto count = [](void* data) { ++*static_cast<std::atomic<int>*>(data); };
  together(ranks, [&](Rank& rank) {
    capture(rank, [&](Rank& one) {
      OK(cuLaunchHostFunc(one.stream, count, &first));
      sum(one);
    });
    make(rank);
    // One node of the executable, not of the graph.
    const CUDA_HOST_NODE_PARAMS params{count, &second};
    OK(cuGraphExecHostNodeSetParams(rank.exec, first_of(rank.graph, CU_GRAPH_NODE_TYPE_HOST), &params));
  });
  replay(ranks, 1, 3);
  over(host);
  replay(ranks, 2, 5);
  CHECK(first == 0 && second == 4);
  // The graph is changed: what was made of it stays what it is.
  for (Rank& rank : ranks) {
    CUgraphNode node = nullptr;
    const CUDA_HOST_NODE_PARAMS params{count, &first};
    OK(cuGraphAddHostNode(&node, rank.graph, nullptr, 0, &params));
  }
  over(host);
  replay(ranks, 3, 7);
  CHECK(first == 0 && second == 6);
  // Its nodes are still known by those of the graph.
  for (Rank& rank : ranks) {
    const CUDA_HOST_NODE_PARAMS params{count, &first};
    OK(cuGraphExecHostNodeSetParams(rank.exec, first_of(rank.graph, CU_GRAPH_NODE_TYPE_HOST), &params));
  }
  replay(ranks, 3, 7);
  over(host);
  replay(ranks, 4, 9);
  CHECK(first == 4 && second == 6);
  end(ranks);
  // All of an executable, by another graph.
  ranks = fresh(all);
  together(ranks, [&](Rank& rank) {
    capture(rank, [&](Rank& one) { sum(one); });
    make(rank);
    CUgraph old = rank.graph;
    capture(rank, [&](Rank& one) { OK(ncclAllReduce(&one.in, &one.got, 1, kInt64, 0, one.comm, one.stream)); });
    CUgraphExecUpdateResultInfo info{};
    OK(cuGraphExecUpdate_v2(rank.exec, rank.graph, &info));
    OK(cuGraphDestroy(old));
    OK(cuGraphDestroy(rank.graph));
    rank.out = -1;
  });
  replay(ranks, 5, -1);
  CHECK(ranks[1].got == 11);
  over(host);
  replay(ranks, 6, -1);
  CHECK(ranks[1].got == 13);
  end(ranks, false);
}

// Graphs of which no executable was made yet.
void made_later(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  together(ranks, [](Rank& rank) { capture(rank, [](Rank& one) { sum(one); }); });
  over(host);
  for (Rank& rank : ranks) make(rank);
  replay(ranks, 1, 3);
  end(ranks);
}

// NCCL's destroy waits for graphs, and no longer: also for those of the proxy's own.
void ended(Host& host, Ranks& all) {
  for (const bool torn : {false, true}) {
    Ranks ranks = fresh(all);
    join(ranks, &Rank::comm);
    together(ranks, [](Rank& rank) {
      sum(rank);
      capture(rank, [](Rank& one) { sum(one); });
      make(rank);
      OK(cuGraphDestroy(rank.graph));
    });
    replay(ranks, 1, 3);
    if (torn) over(host);
    replay(ranks, 2, 5);
    std::atomic<int> gone{0};
    std::vector<std::thread> threads;
    for (Rank& rank : ranks) {
      threads.emplace_back([&] {
        OK(ncclCommDestroy(rank.comm));
        ++gone;
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(gone == 0);
    end(ranks, false);
    for (auto& thread : threads) thread.join();
  }
}

// A launch is held at the gate as a call is, and its partner is let go on.
void held(Host& host, Ranks& all, const std::string& name) {
  Ranks ranks = fresh(all);
  together(ranks, [](Rank& rank) {
    capture(rank, [](Rank& one) { sum(one); });
    make(rank);
    rank.in = 1 + rank.number;
  });
  std::atomic<int> launched{0};
  const auto launch = [&](Rank& rank) {
    OK(cuCtxSetCurrent(context));
    OK(cuGraphLaunch(rank.exec, rank.stream));
    ++launched;
  };
  const Report before = host.order(Host::Open);
  launch(ranks[0]);
  host.order(Host::Cut);
  std::thread late([&] { launch(ranks[1]); });
  Report report = until(host, Host::Cut, [](const Report& one) { return one.held.size() == 1; });
  CHECK(launched == 1 && report.held[0].lanes.size() == 1);
  CHECK(!host.order(Host::Drain).undrained.empty());
  host.order(Host::Cut, {}, {{name, 1, 0, -1, before.count(name, 0) + 1}});
  late.join();
  host.order(Host::Drain);
  until(host, Host::Drain, [](const Report& one) { return one.undrained.empty(); });
  for (Rank& rank : ranks) {
    OK(cuStreamSynchronize(rank.stream));
    CHECK(rank.out == 3);
  }
  // Held while the communicators go: it launches what was made anew.
  std::thread first([&] { launch(ranks[0]); });
  report = until(host, Host::Drain, [](const Report& one) { return one.held.size() == 1; });
  CHECK(host.teardown().empty());
  host.part();
  CHECK(host.greet());
  CHECK(host.rebuild({}).find("was not among those") != std::string::npos);  // a try that fails
  CHECK(host.teardown().empty());
  CHECK(host.rebuild(ready(report)).empty());
  host.order(Host::Open);
  ++host.attempt;
  host.round = 0;
  first.join();
  launch(ranks[1]);
  for (Rank& rank : ranks) OK(cuStreamSynchronize(rank.stream));
  end(ranks);
}

// ---- what is refused, by name

void refusals(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  Rank& one = ranks[0];
  // A capture that has not ended is waited for.
  OK(cuStreamBeginCapture_v2(one.stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  sum(one);
  sum(ranks[1]);  // eager: nobody waits for it
  const auto drained = host.order(Host::Cut);
  CHECK(host.order(Host::Drain).undrained.size() >= 1);
  CHECK(host.teardown().find("capture") != std::string::npos);
  host.order(Host::Open);
  OK(cuStreamEndCapture(one.stream, &one.graph));
  sum(one);
  for (Rank& rank : ranks) OK(cuStreamSynchronize(rank.stream));
  ++host.attempt;
  host.round = 0;
  CHECK(host.refusals().empty());
  // Launched from the device: its handle is real.
  make(one, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH);
  CHECK(refused(host, "launch from the device"));
  OK(cuGraphExecDestroy(one.exec));
  CHECK(host.refusals().empty());
  // A node of NCCL's that the job changes.
  make(one);
  CUDA_HOST_NODE_PARAMS params{};
  CUgraphNode node = first_of(one.graph, CU_GRAPH_NODE_TYPE_HOST);
  OK(cuGraphHostNodeGetParams(node, &params));
  OK(cuGraphExecHostNodeSetParams(one.exec, node, &params));
  CHECK(refused(host, "which NCCL added"));
  end(ranks = {std::move(one)}, true);
  CHECK(host.refusals().empty());
}

void conditional(Host& host, Ranks& all) {
  Ranks ranks = fresh(all);
  Rank& one = ranks[0];
  CUgraphNode node = nullptr;
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.size = 1;
  OK(cuGraphCreate(&one.graph, 0));
  OK(cuGraphAddNode_v2(&node, one.graph, nullptr, nullptr, 0, &params));
  OK(cuStreamBeginCaptureToGraph(one.stream, params.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                 CU_STREAM_CAPTURE_MODE_RELAXED));
  sum(one);
  CUgraph body = nullptr;
  OK(cuStreamEndCapture(one.stream, &body));
  CHECK(refused(host, "conditional"));
  OK(cuGraphDestroy(one.graph));
  CHECK(host.refusals().empty());
}

}  // namespace

int main() {
  char folder[] = "/tmp/moorage-graphs-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/nccl.sock";
  Host host(path);
  setenv("MOORAGE_NCCL_SOCKET", path.c_str(), 1);
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  OK(cuCtxSetCurrent(context));
  Ranks ranks(2);
  for (int i = 0; i < 2; ++i) {
    ranks[static_cast<std::size_t>(i)].number = i;
    OK(cuStreamCreate(&ranks[static_cast<std::size_t>(i)].stream, 0));
  }
  std::thread greeter([&host] { CHECK(!host.greet()); });  // nobody makes a communicator before the worker's welcome
  join(ranks, &Rank::comm);
  greeter.join();
  const std::string name = host.order(Host::Open).names.at(0);
  join(ranks, &Rank::second);
  together(ranks, [](Rank& rank) {
    rank.in = rank.number;
    sum(rank);
    sum(rank, rank.second);
    OK(cuStreamSynchronize(rank.stream));
    CHECK(rank.out == 1);
  });
  plain(host, ranks);
  several(host, ranks);
  another_shape(host, ranks);
  memory(host, ranks);
  copies(host, ranks);
  updates(host, ranks);
  made_later(host, ranks);
  ended(host, ranks);
  held(host, ranks, name);
  refusals(host, ranks);
  conditional(host, ranks);
  over(host);  // one rank captured more than the other
  plain(host, ranks);
  unlink(path.c_str());
  rmdir(folder);
  std::puts("all as it should be");
  std::fflush(stdout);
  std::_Exit(0);
}
