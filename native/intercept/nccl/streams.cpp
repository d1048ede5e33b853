#include "streams.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include "cuda.h"
#include "entry.h"

namespace moorage::nccl::streams {
namespace {

constexpr unsigned kNonBlocking = 1;
constexpr unsigned kWithoutTime = 2;

constinit cuda::Entry<int(void**, unsigned)> create_stream("cuStreamCreate");
constinit cuda::Entry<int(void*, void*, unsigned)> wait_event("cuStreamWaitEvent");
constinit cuda::Entry<int(void**, unsigned)> create_event("cuEventCreate");
constinit cuda::Entry<int(void*, void*)> record_event("cuEventRecord");
constinit cuda::Entry<int(void*)> query_event("cuEventQuery");
constinit cuda::Entry<int(void*)> destroy_event("cuEventDestroy_v2");
using Mark = void* (*)(void*);
constinit cuda::Entry<void(void (*)(void*, Mark))> tell_ends("moorage_tell_stream_ends");

// ---- streams that end

constexpr std::size_t kMany = 16;

// Held while streams and events are asked, so that none of them goes meanwhile. Before the gate's lock.
std::mutex& sweeping() {
  static auto* const one = new std::mutex;
  return *one;
}

// Of events behind which nothing is left: they have done their duty.
void forget_done(std::vector<Left>& events) {
  std::erase_if(events, [](const Left& one) {
    if (query_event.get()(one.event) == cuda::kBusy) return false;
    destroy_event.get()(one.event);
    return true;
  });
}

// The libcuda proxy says that a stream is about to be destroyed. What is in it goes on, and its handle may be another
// stream's soon.
void ends(void* stream, Mark mark) {
  const auto known = [stream](const Comm* comm) {
    return std::find(comm->streams.begin(), comm->streams.end(), stream) != comm->streams.end();
  };
  std::vector<Comm*> with;
  {
    const Gate::Lock lock(gate().mutex);
    std::copy_if(comms().begin(), comms().end(), std::back_inserter(with), known);
  }
  for (Comm* comm : with) {
    void* event = mark(stream);  // without a lock: the driver may let wait whoever records
    const std::lock_guard alone(sweeping());
    std::vector<Left> older;
    {
      const Gate::Lock lock(gate().mutex);
      std::erase(comm->streams, stream);
      if (event != nullptr) comm->left.push_back({event, stream});
      if (comm->left.size() >= kMany) older = std::exchange(comm->left, {});
    }
    if (older.empty()) continue;
    forget_done(older);
    const Gate::Lock lock(gate().mutex);
    comm->left.insert(comm->left.end(), older.begin(), older.end());
  }
}

void watch() {
  static std::atomic<bool> watching{false};
  if (watching.load(std::memory_order_relaxed)) return;
  if (auto* tell = tell_ends.get()) {
    watching.store(true, std::memory_order_relaxed);
    tell(ends);
  }
}

std::string named(void* stream, const Comm& comm, const char* what = "") {
  char text[64];
  std::snprintf(text, sizeof text, "%p%s", stream, what);
  return std::string(text) + " of communicator " + std::string(comm.name());
}

// ---- the default stream of a thread

struct Own {
  void* stream = nullptr;
  void* begins = nullptr;
  void* ends = nullptr;
};
struct Pool {
  std::mutex mutex;
  std::multimap<void*, Own> idle;  // by context
};
Pool& pool() {
  static auto* const one = new Pool;  // never destroyed
  return *one;
}

// A thread that ends leaves its streams to others.
struct Mine {
  std::map<void*, Own> all;
  ~Mine() {
    const std::lock_guard lock(pool().mutex);
    for (auto& [context, own] : all) pool().idle.emplace(context, own);
  }
};
thread_local Mine mine;

bool make(Own& own) {
  return create_stream.get() != nullptr && wait_event.get() != nullptr && record_event.get() != nullptr &&
         create_event.get() != nullptr && create_stream.get()(&own.stream, kNonBlocking) == 0 &&
         create_event.get()(&own.begins, kWithoutTime) == 0 && create_event.get()(&own.ends, kWithoutTime) == 0;
}

// In this context for a while.
class In {
 public:
  explicit In(void* context) : before_(cuda::current_context()), changed_(before_ != context) {
    if (changed_) cuda::set_context(context);
  }
  ~In() {
    if (changed_) cuda::set_context(before_);
  }
  In(const In&) = delete;
  In& operator=(const In&) = delete;

 private:
  void* before_;
  bool changed_;
};

Own* own_of(void* context) {
  const auto known = mine.all.find(context);
  if (known != mine.all.end()) return &known->second;
  Own own;
  {
    const std::lock_guard lock(pool().mutex);
    const auto idle = pool().idle.find(context);
    if (idle != pool().idle.end()) {
      own = idle->second;
      pool().idle.erase(idle);
    }
  }
  if (own.stream == nullptr && !make(own)) return nullptr;
  return &(mine.all[context] = own);
}

}  // namespace

void note(Comm& comm, void* stream) {
  auto& all = comm.streams;
  if (!all.empty() && all.back() == stream) [[likely]] return;
  const auto found = std::find(all.begin(), all.end(), stream);
  if (found != all.end()) {
    std::swap(*found, all.back());
    return;
  }
  watch();
  if (cuda::per_thread(stream)) comm.refused.insert("per-thread default stream");
  all.push_back(stream);
}

std::vector<std::string> busy() {
  struct Asked {
    void* stream;
    void* context;
    std::string name;
  };
  std::vector<Asked> asked;
  std::vector<std::string> found;
  std::vector<std::pair<Comm*, std::vector<Left>>> ended;
  const std::lock_guard alone(sweeping());
  {
    const Gate::Lock lock(gate().mutex);
    for (Comm* comm : comms()) {
      for (void* stream : comm->streams) asked.push_back({stream, comm->context, named(stream, *comm)});
      if (!comm->left.empty()) ended.emplace_back(comm, std::exchange(comm->left, {}));
    }
  }
  for (const Asked& one : asked) {
    if (cuda::work(one.stream, one.context) == cuda::Work::Busy) found.push_back(one.name);
  }
  for (auto& [comm, left] : ended) {
    forget_done(left);
    const Gate::Lock lock(gate().mutex);
    for (const Left& one : left) found.push_back(named(one.stream, *comm, " (destroyed)"));
    comm->left.insert(comm->left.end(), left.begin(), left.end());
  }
  return found;
}

void* Detour::through(const Comm& comm, void* stream) {
  if (!cuda::per_thread(stream)) [[likely]] return stream;
  const In there(comm.context);
  const Own* own = own_of(comm.context);
  if (own == nullptr) return stream;
  if (std::find(contexts_.begin(), contexts_.end(), comm.context) == contexts_.end()) contexts_.push_back(comm.context);
  return own->stream;
}

void Detour::leave() const {
  for (void* context : contexts_) {
    const In there(context);
    const Own* own = own_of(context);
    record_event.get()(own->begins, cuda::kPerThread);
    wait_event.get()(own->stream, own->begins, 0);
  }
}

void Detour::join() const {
  for (void* context : contexts_) {
    const In there(context);
    const Own* own = own_of(context);
    record_event.get()(own->ends, own->stream);
    wait_event.get()(cuda::kPerThread, own->ends, 0);
  }
}

}  // namespace moorage::nccl::streams
