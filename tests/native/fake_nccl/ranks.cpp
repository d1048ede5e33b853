// Several ranks in one process, a thread each, that were linked against libnccl.so.2 and met the proxy.
#include <dlfcn.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <thread>

#include "api.h"
#include "host.h"

using moorage::nccl::UniqueId;

extern "C" {
int ncclGetUniqueId(UniqueId*);
int ncclCommInitRank(void**, int, UniqueId, int);
int ncclCommInitRankConfig(void**, int, UniqueId, int, void*);
int ncclCommInitAll(void**, int, const int*);
int ncclCommSplit(void*, int, int, void**, void*);
int ncclCommShrink(void*, int*, int, void**, void*, int);
int ncclCommGetUniqueId(void*, UniqueId*);
int ncclCommGrow(void*, int, const UniqueId*, int, void**, void*);
int ncclCommDestroy(void*);
int ncclCommAbort(void*);
int ncclCommCount(void*, int*);
int ncclCommUserRank(void*, int*);
int ncclCommGetAsyncError(void*, int*);
int ncclCommRegister(void*, void*, std::size_t, void**);
int ncclCommWindowRegister(void*, void*, std::size_t, void**, int);
int ncclWinGetUserPtr(void*, void*, void**);
int ncclRedOpCreatePreMulSum(int*, void*, int, int, void*);
int ncclRedOpDestroy(int, void*);
int ncclAllReduce(const void*, void*, std::size_t, int, int, void*, void*);
int ncclSend(const void*, std::size_t, int, int, void*, void*);
int ncclRecv(void*, std::size_t, int, int, void*, void*);
int ncclGroupStart();
int ncclGroupEnd();
int ncclGroupSimulateEnd(void*);
int cuStreamCreate(void**, unsigned);
int cuStreamDestroy_v2(void*);
int cuStreamSynchronize(void*);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
}

namespace {

constexpr int kInt64 = 4;
constexpr int kInProgress = 7;
#define OK(call) CHECK((call) == 0)

struct Rank {
  void* comm = nullptr;
  void* stream = nullptr;
  std::int64_t in = 0;
  std::int64_t out = 0;
};

void* fresh_stream() {
  void* stream = nullptr;
  OK(cuStreamCreate(&stream, 0));
  return stream;
}

void sum(Rank& rank, std::int64_t value, int reduction = 0) {
  rank.in = value;
  OK(ncclAllReduce(&rank.in, &rank.out, 1, kInt64, reduction, rank.comm, rank.stream));
}

// What each rank does, at the same time.
void together(std::vector<Rank>& ranks, const std::function<void(Rank&, int)>& work) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] { work(ranks[i], static_cast<int>(i)); });
  }
  for (auto& thread : threads) thread.join();
}

std::vector<Rank> make(int size) {
  std::vector<Rank> ranks(static_cast<std::size_t>(size));
  UniqueId id{};
  OK(ncclGetUniqueId(&id));
  together(ranks, [&](Rank& rank, int number) {
    rank.stream = fresh_stream();
    OK(ncclCommInitRank(&rank.comm, size, id, number));
  });
  return ranks;
}

void right(std::vector<Rank>& ranks, std::int64_t expected) {
  for (Rank& rank : ranks) {
    OK(cuStreamSynchronize(rank.stream));
    CHECK(rank.out == expected);
  }
}

// The names of communicators that are ready.
std::vector<std::string> ready(const Report& report) {
  std::vector<std::string> names;
  for (const Handle& handle : report.handles) {
    bool whole = true;
    for (const Handle& other : report.handles) whole = whole && (other.communicator != handle.communicator || other.state == 1);
    bool known = false;
    for (const std::string& name : names) known = known || name == handle.communicator;
    if (whole && !known) names.push_back(handle.communicator);
  }
  return names;
}

// From gates that are closed and drained to communicators made anew and open gates.
void over(Host& host, const std::vector<std::string>& again = {}) {
  const Report last = until(host, Host::Drain, [](const Report& report) { return report.undrained.empty(); });
  CHECK(host.teardown(again).empty());
  host.part();
  CHECK(host.greet());
  std::vector<std::string> fresh;
  for (const std::string& name : again) {
    if (name.find('/') == std::string::npos) fresh.push_back(name);
  }
  CHECK(host.rebuild(ready(last), fresh).empty());
  const Report open = host.order(Host::Open);
  CHECK(!open.stale);
  ++host.attempt;
  host.round = 0;
}

void exports() {
  std::ifstream list(EXPORTS);
  std::string name;
  void* proxy = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  CHECK(proxy != nullptr);
  int count = 0;
  for (; std::getline(list, name); ++count) CHECK(dlsym(proxy, name.c_str()) != nullptr);
  CHECK(count == 193);
}

void counts_and_holds(Host& host, std::vector<Rank>& ranks, const std::string& name) {
  together(ranks, [](Rank& rank, int number) {
    std::int64_t got = -1;
    OK(ncclGroupStart());
    OK(ncclSend(&rank.in, 1, kInt64, 1 - number, rank.comm, rank.stream));
    OK(ncclGroupStart());
    OK(ncclRecv(&got, 1, kInt64, 1 - number, rank.comm, rank.stream));
    OK(ncclGroupEnd());
    OK(ncclGroupEnd());
    OK(cuStreamSynchronize(rank.stream));
    CHECK(got == 1 - number);
    // A group that is only tried out issues nothing.
    OK(ncclGroupStart());
    sum(rank, 1);
    OK(ncclGroupSimulateEnd(nullptr));
  });
  Report report = host.order(Host::Open);
  for (const int member : {0, 1}) {
    CHECK(report.count(name, member, 1, 1 - member) == 1 && report.count(name, member, 2, 1 - member) == 1);
    CHECK(report.count(name, member) == 1);
  }
  // The first is let in, the gates close, the second is held, and goes on as far as the first has.
  std::atomic<int> passed{0};
  std::thread ahead([&] {
    sum(ranks[0], 5);
    ++passed;
  });
  ahead.join();
  host.order(Host::Cut);
  std::thread behind([&] {
    sum(ranks[1], 6);
    ++passed;
    std::int64_t two = 0;
    OK(ncclAllReduce(&ranks[1].in, &two, 1, kInt64, 0, ranks[1].comm, ranks[1].stream));
    ++passed;
    OK(cuStreamSynchronize(ranks[1].stream));
    CHECK(two == 12);
  });
  report = until(host, Host::Cut, [](const Report& one) { return one.held.size() == 1; });
  CHECK(passed == 1 && report.count(name, 0) == 2 && report.count(name, 1) == 1);
  CHECK(report.held[0].lanes.size() == 1 && report.held[0].lanes[0].count == 1);
  report = host.order(Host::Cut, {}, {{name, 1, 0, -1, 2}});
  CHECK(report.count(name, 1) == 2);
  report = until(host, Host::Cut, [](const Report& one) { return one.held.size() == 1; });
  CHECK(passed == 2);  // and its next one is held again
  right(ranks, 11);
  // Late orders change nothing.
  --host.round;
  host.round -= 1;
  const std::uint64_t moves = report.moves;
  report = host.order(Host::Open);
  CHECK(report.stale && report.moves == moves);
  host.round += 1;
  // By ticket, and its partner, which then is owed.
  const std::uint64_t ticket = until(host, Host::Cut, [](const Report& one) { return one.held.size() == 1; }).held[0].ticket;
  host.order(Host::Cut, {ticket});
  until(host, Host::Cut, [&](const Report& one) { return one.count(name, 1) == 3; });
  std::thread partner([&] { sum(ranks[0], 6); });
  until(host, Host::Cut, [](const Report& one) { return one.held.size() == 1; });
  host.order(Host::Cut, {}, {{name, 0, 0, -1, 3}});
  partner.join();
  behind.join();
  OK(cuStreamSynchronize(ranks[0].stream));
  CHECK(ranks[0].out == 12 && passed == 3);
}

void made_anew(Host& host, std::vector<Rank>& ranks) {
  void* const before = ranks[0].comm;
  std::int64_t factor = 10;
  std::vector<int> reductions(ranks.size());
  std::vector<void*> windows(ranks.size());
  together(ranks, [&](Rank& rank, int number) {
    const auto place = static_cast<std::size_t>(number);
    void* handle = nullptr;
    OK(ncclCommRegister(rank.comm, &rank.in, sizeof rank.in, &handle));
    OK(ncclCommWindowRegister(rank.comm, &rank.in, sizeof rank.in, &windows[place], 0));
    OK(ncclRedOpCreatePreMulSum(&reductions[place], &factor, kInt64, 1, rank.comm));
    sum(rank, 1, reductions[place]);
  });
  factor = 0;  // NCCL took a copy
  right(ranks, 20);
  host.order(Host::Cut);
  std::atomic<bool> through{false};
  std::thread early([&] {
    sum(ranks[0], 1, reductions[0]);
    through = true;
  });
  until(host, Host::Cut, [](const Report& one) { return one.held.size() == 1; });
  until(host, Host::Drain, [](const Report& report) { return report.undrained.empty(); });
  CHECK(host.teardown().empty());
  // While they are gone.
  int answer = -1;
  OK(ncclCommCount(ranks[0].comm, &answer));
  CHECK(answer == 2);
  OK(ncclCommUserRank(ranks[1].comm, &answer));
  CHECK(answer == 1);
  OK(ncclCommGetAsyncError(ranks[0].comm, &answer));
  CHECK(answer == 0 && !through);
  CHECK(host.rebuild({}).find("was not among those") != std::string::npos);
  CHECK(host.teardown().empty());
  const auto names = ready(host.order(Host::Drain));
  CHECK(host.rebuild(names).empty());
  CHECK(!through);
  host.order(Host::Open);
  sum(ranks[1], 2, reductions[1]);
  early.join();
  right(ranks, 30);
  CHECK(ranks[0].comm == before);
  void* user = nullptr;
  OK(ncclWinGetUserPtr(ranks[1].comm, windows[1], &user));
  CHECK(user == &ranks[1].in);
  for (const std::size_t i : {0U, 1U}) OK(ncclRedOpDestroy(reductions[i], ranks[i].comm));
  ++host.attempt;
  host.round = 0;
}

void children(Host& host, std::vector<Rank>& ranks) {
  std::vector<Rank> halves(ranks.size());
  together(halves, [&](Rank& half, int number) {
    half.stream = ranks[static_cast<std::size_t>(number)].stream;
    OK(ncclCommSplit(ranks[static_cast<std::size_t>(number)].comm, 7, -number, &half.comm, nullptr));
    int place = -1;
    OK(ncclCommUserRank(half.comm, &place));
    CHECK(place == 1 - number);
    sum(half, number);
  });
  right(halves, 1);
  // One that only the first has a part in; the others have no say in a shrink that excludes them.
  int excluded = 1;
  Rank alone{.stream = fresh_stream()};
  OK(ncclCommShrink(ranks[0].comm, &excluded, 1, &alone.comm, nullptr, 0));
  sum(alone, 3);
  OK(cuStreamSynchronize(alone.stream));
  CHECK(alone.out == 3);
  host.order(Host::Cut);
  over(host);
  together(halves, [](Rank& half, int number) { sum(half, 10 * number); });
  right(halves, 10);
  sum(alone, 4);
  OK(cuStreamSynchronize(alone.stream));
  CHECK(alone.out == 4);
  together(halves, [](Rank& half, int) { OK(ncclCommDestroy(half.comm)); });
  OK(ncclCommAbort(alone.comm));
}

// A creation that its partner has not come to is taken back, and made with a fresh id when both have.
void taken_back(Host& host, bool waits) {
  const moorage::nccl::ConfigHead config{sizeof config, moorage::nccl::kMagic, 21400, waits ? 1 : 0};
  UniqueId id{};
  OK(ncclGetUniqueId(&id));
  std::vector<Rank> ranks(2);
  for (Rank& rank : ranks) rank.stream = fresh_stream();
  const auto create = [&](int number) {
    auto given = config;
    void** comm = &ranks[static_cast<std::size_t>(number)].comm;
    const int result = ncclCommInitRankConfig(comm, 2, id, number, &given);
    CHECK(result == (waits ? 0 : kInProgress));
    int state = kInProgress;
    while (state == kInProgress) {
      OK(ncclCommGetAsyncError(*comm, &state));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(state == 0);
  };
  std::thread first(create, 0);
  Report report = until(host, Host::Open, [](const Report& one) { return one.inside.size() == 1; });
  CHECK(report.inside[0].creates == 1);
  host.order(Host::Drain);
  std::string name;
  for (const Handle& handle : report.handles) {
    if (handle.state == 0) name = handle.communicator;
  }
  over(host, {name});
  std::thread second(create, 1);
  first.join();
  second.join();
  together(ranks, [&](Rank& rank, int number) {
    rank.in = number + 1;
    const int result = ncclAllReduce(&rank.in, &rank.out, 1, kInt64, 0, rank.comm, rank.stream);
    CHECK(result == 0 || (result == kInProgress && !waits));
    int state = kInProgress;
    while (state == kInProgress) OK(ncclCommGetAsyncError(rank.comm, &state));
  });
  right(ranks, 3);
  host.order(Host::Cut);
  over(host);
  for (Rank& rank : ranks) OK(ncclCommAbort(rank.comm));
}

// The default stream of a thread is ordered around NCCL's work as any other, and a drain sees what is in it; so it does
// with the default stream of all, and with a stream that its job has destroyed.
void unusual_streams(Host& host, std::vector<Rank>& ranks) {
  void* const per_thread = reinterpret_cast<void*>(2);
  const auto in_own = [&](std::size_t number) {
    struct Seen {
      Rank* rank;
      std::int64_t out;
    };
    Rank own{.comm = ranks[number].comm, .stream = per_thread};
    Seen seen{&own, 0};
    OK(cuLaunchHostFunc(per_thread, [](void* data) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      static_cast<Seen*>(data)->rank->in = 4;
    }, &seen));
    OK(ncclAllReduce(&own.in, &own.out, 1, kInt64, 0, own.comm, own.stream));
    OK(cuLaunchHostFunc(per_thread, [](void* data) {
      static_cast<Seen*>(data)->out = static_cast<Seen*>(data)->rank->out;
    }, &seen));
    OK(cuStreamSynchronize(per_thread));
    CHECK(seen.out == 8);
    OK(ncclGroupStart());
    const int other = 1 - static_cast<int>(number);
    OK(ncclSend(&own.in, 1, kInt64, other, own.comm, own.stream));
    OK(ncclRecv(&own.out, 1, kInt64, other, own.comm, own.stream));
    OK(ncclGroupEnd());
    OK(cuStreamSynchronize(per_thread));
    CHECK(own.out == 4);
  };
  const auto wet = [&](const char* what) {
    host.order(Host::Cut);
    const Report report = host.order(Host::Drain);
    CHECK(!report.undrained.empty() && report.undrained.back().find(what) != std::string::npos);
    host.order(Host::Open);
  };
  const auto dry = [&] {
    host.order(Host::Cut);
    over(host);
  };
  std::thread first(in_own, 0);
  std::thread second(in_own, 1);
  first.join();
  second.join();
  dry();

  // One is there, its partner is not; but for the first operation, which waits for its partner in the call itself.
  void* const kept = ranks[0].stream;
  together(ranks, [](Rank& rank, int number) { sum(rank, number); });
  right(ranks, 1);
  const auto one_by_one = [&](void* stream, const char* what, const std::function<void()>& then) {
    ranks[0].stream = stream;
    sum(ranks[0], 1);
    then();
    wet(what);
    sum(ranks[1], 2);
    OK(cuStreamSynchronize(ranks[1].stream));
    until(host, Host::Drain, [](const Report& report) { return report.undrained.empty(); });
    host.order(Host::Open);
    CHECK(ranks[0].out == 3);
  };
  one_by_one(per_thread, " of communicator id-", [] {});
  one_by_one(nullptr, "(nil) of communicator id-", [] {});
  void* const passing = fresh_stream();
  one_by_one(passing, "(destroyed) of communicator id-", [passing] { OK(cuStreamDestroy_v2(passing)); });
  ranks[0].stream = kept;
  dry();
  together(ranks, [](Rank& rank, int number) { sum(rank, number); });
  right(ranks, 1);
}

// Whoever leads finds out that a partner is no more, which finalizing or a new creation waits for: a later command calls
// that off, and nobody waits for the deadline.
void called_off(Host& host) {
  auto pair = make(2);
  std::string name;
  together(pair, [](Rank& rank, int number) { sum(rank, number); });
  right(pair, 1);
  OK(ncclCommAbort(pair[1].comm));
  for (const Handle& handle : host.order(Host::Open).handles) {
    if (handle.state == 2 && handle.member == 1 && handle.communicator.starts_with("id-")) name = handle.communicator;
  }
  CHECK(!host.keep().empty());
  host.order(Host::Cut);
  CHECK(!host.keep().empty());
  const Report last = until(host, Host::Drain, [](const Report& report) { return report.undrained.empty(); });
  CHECK(host.keep().empty());
  host.send_teardown({}, {}, false);
  host.send_teardown({}, {}, true);
  CHECK(host.outcome(1).ends_with("was called off"));
  CHECK(host.outcome().empty());
  CHECK(host.keep().empty());
  auto names = ready(last);
  names.insert(names.begin(), name);
  host.send_rebuild(names);
  host.send_teardown({}, {name}, true);
  CHECK(host.outcome(1).ends_with("was called off"));
  CHECK(host.outcome().empty());
  names.erase(names.begin());
  CHECK(host.rebuild(names).empty());
  host.order(Host::Open);
  ++host.attempt;
  host.round = 0;
  OK(ncclCommAbort(pair[0].comm));
}

// A process that came after a cut had taken the creation back has the old id; the worker knows which one is in its place.
void came_late(Host& host) {
  UniqueId old{};
  UniqueId fresh{};
  OK(ncclGetUniqueId(&old));
  OK(ncclGetUniqueId(&fresh));
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char byte : old.internal) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  char name[24];
  std::snprintf(name, sizeof name, "id-%016llx", static_cast<unsigned long long>(hash));
  host.renew(name, {fresh.internal, sizeof fresh.internal});
  host.order(Host::Open);  // it has been read
  std::vector<Rank> pair(2);
  together(pair, [&](Rank& rank, int number) {
    rank.stream = fresh_stream();
    OK(ncclCommInitRank(&rank.comm, 2, number == 0 ? old : fresh, number));
    sum(rank, number);
  });
  right(pair, 1);
  together(pair, [](Rank& rank, int) { OK(ncclCommAbort(rank.comm)); });
}

// Two members and one that joins: all three know one name. Then the same, with one that comes late to the creation.
void grown(Host& host, std::vector<Rank>& ranks) {
  for (const bool late : {false, true}) {
    UniqueId id{};
    OK(ncclCommGetUniqueId(ranks[0].comm, &id));
    CHECK(host.refusals().size() == 1);  // it would not be good for anything after a cut
    std::vector<Rank> all(3);
    for (Rank& rank : all) rank.stream = fresh_stream();
    const auto grow = [&](std::size_t number) {
      const bool joins = number == 2;
      UniqueId mine = id;
      void* parent = joins ? nullptr : ranks[number].comm;
      OK(ncclCommGrow(parent, 3, number == 1 ? nullptr : &mine, joins ? 2 : -1, &all[number].comm, nullptr));
      int place = -1;
      OK(ncclCommUserRank(all[number].comm, &place));
      CHECK(place == static_cast<int>(number));
    };
    std::thread first(grow, 0);
    std::thread third(grow, 2);
    std::thread second;
    if (late) {
      const Report report = until(host, Host::Open, [](const Report& one) { return one.inside.size() == 2; });
      std::string name;
      for (const Handle& handle : report.handles) {
        if (handle.state == 0 && handle.size == 3) name = handle.communicator;
      }
      host.order(Host::Drain);
      over(host, {name});
    }
    second = std::thread(grow, 1);
    for (std::thread* thread : {&first, &second, &third}) thread->join();
    CHECK(host.refusals().empty());
    together(all, [](Rank& rank, int number) { sum(rank, number + 1); });
    right(all, 6);
    host.order(Host::Cut);
    over(host);
    together(all, [](Rank& rank, int number) { sum(rank, 10 * number); });
    right(all, 30);
    const Report report = host.order(Host::Open);
    std::vector<Handle> members;
    for (const Handle& handle : report.handles) {
      if (handle.communicator.starts_with("grow-") && handle.state == 1) members.push_back(handle);
    }
    CHECK(members.size() == 3);
    for (const Handle& one : members) CHECK(one.size == 3 && one.communicator == members[0].communicator);
    together(all, [](Rank& rank, int) { OK(ncclCommDestroy(rank.comm)); });
  }
}

void all_of_one_thread(Host& host) {
  void* comms[3] = {};
  std::vector<Rank> ranks(3);
  OK(ncclCommInitAll(comms, 3, nullptr));
  const auto all = [&](std::int64_t base) {
    OK(ncclGroupStart());
    for (Rank& rank : ranks) sum(rank, base + (&rank - ranks.data()));
    OK(ncclGroupEnd());
  };
  for (std::size_t i = 0; i < 3; ++i) ranks[i] = {.comm = comms[i], .stream = fresh_stream()};
  all(1);
  right(ranks, 6);
  host.order(Host::Cut);
  over(host);
  all(10);
  right(ranks, 33);
  OK(ncclGroupStart());
  for (Rank& rank : ranks) OK(ncclCommDestroy(rank.comm));
  OK(ncclGroupEnd());
}

void refused(Host& host, std::vector<Rank>& ranks, const std::string& name) {
  CHECK(host.refusals().empty());
  together(ranks, [](Rank& rank, int number) { sum(rank, number); });
  right(ranks, 1);
  OK(cuStreamBeginCapture_v2(ranks[0].stream, 0));
  sum(ranks[0], 1);
  void* graph = nullptr;
  OK(cuStreamEndCapture(ranks[0].stream, &graph));
  const auto found = host.refusals();
  CHECK(found.size() == 1 && found[0] == name + " captured");
  host.order(Host::Cut);
  CHECK(!host.order(Host::Drain).undrained.empty());
  CHECK(host.teardown().find("captured") != std::string::npos);
  host.order(Host::Open);
}

}  // namespace

int main() {
  char folder[] = "/tmp/moorage-nccl-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/nccl.sock";
  Host host(path);
  setenv("MOORAGE_NCCL_SOCKET", path.c_str(), 1);
  exports();
  std::thread greeter([&host] { CHECK(!host.greet()); });  // nobody makes a communicator before the worker's welcome
  auto ranks = make(2);
  greeter.join();
  together(ranks, [](Rank& rank, int number) { sum(rank, number); });
  right(ranks, 1);
  const std::string name = host.order(Host::Open).names.at(0);
  counts_and_holds(host, ranks, name);
  host.order(Host::Open);
  ++host.attempt;
  host.round = 0;
  made_anew(host, ranks);
  children(host, ranks);
  taken_back(host, true);
  taken_back(host, false);
  unusual_streams(host, ranks);
  grown(host, ranks);
  called_off(host);
  came_late(host);
  all_of_one_thread(host);
  refused(host, ranks, name);
  unlink(path.c_str());
  rmdir(folder);
  std::puts("all as it should be");
  std::fflush(stdout);
  std::_Exit(0);
}
