// NCCL without a GPU, between threads and processes: a file in memory is where ranks meet (FAKE_NCCL_FILE).
//
// Operations truly wait for their partners: a creation for all members, the first collective for all of them in the call
// itself, every operation in its stream, which stands still until its partners have come. So whoever misses one hangs
// the others. A communicator that was destroyed must not be used: that ends the process. Data are int64 (type 4).
//
// Captured into a CUDA graph, an operation adds nodes as NVIDIA's NCCL does, waits for its partners in each
// replay, and keeps its communicator from being destroyed until the graph's user objects are gone.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define FAKE extern "C" __attribute__((visibility("default")))

struct UniqueId {
  char internal[128];
};
// ncclConfig_t up to the name.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0;
  unsigned version = 0;
  int blocking = 1;
  int cluster = 4;
  int least = 1;
  int most = 32;
  const char* net = nullptr;
  int share = 0;
  int traffic = 0;
  const char* name = nullptr;
};

namespace {

enum { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };
constexpr int kInt64 = 4;

// ---- where ranks meet

constexpr std::size_t kSlots = 256;
constexpr std::size_t kBytes = 16 * 1024;

struct Slot {
  char key[120];
  int arrived;
  int left;
  char data[kBytes];
};
struct Place {
  int ready;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  Slot slots[kSlots];
};

Place& place() {
  static Place* const one = [] {
    const char* path = std::getenv("FAKE_NCCL_FILE");
    const int fd = path == nullptr ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (path != nullptr && (fd < 0 || flock(fd, LOCK_EX) != 0 || ftruncate(fd, sizeof(Place)) != 0)) std::abort();
    void* memory = mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE,
                        fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) std::abort();
    auto* made = static_cast<Place*>(memory);
    if (made->ready == 0) {
      pthread_mutexattr_t mutex;
      pthread_mutexattr_init(&mutex);
      pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
      pthread_mutex_init(&made->mutex, &mutex);
      pthread_condattr_t changed;
      pthread_condattr_init(&changed);
      pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
      pthread_cond_init(&made->changed, &changed);
      made->ready = 1;
    }
    if (fd >= 0) flock(fd, LOCK_UN);  // the mapping would keep it
    if (fd >= 0) close(fd);
    return made;
  }();
  return *one;
}

struct Locked {
  Locked() { pthread_mutex_lock(&place().mutex); }
  ~Locked() { pthread_mutex_unlock(&place().mutex); }
};

Slot& slot_of(const std::string& key) {
  Slot* free = nullptr;
  for (Slot& slot : place().slots) {
    if (key == slot.key) return slot;
    if (free == nullptr && slot.key[0] == '\0') free = &slot;
  }
  if (free == nullptr || key.size() >= sizeof free->key) std::abort();
  std::memset(free, 0, sizeof *free);
  std::strcpy(free->key, key.c_str());
  return *free;
}

using Put = std::function<void(char*, bool first)>;
using Take = std::function<void(const char*)>;

void arrive(const std::string& key, const Put& put) {
  const Locked locked;
  Slot& slot = slot_of(key);
  if (put) put(slot.data, slot.arrived == 0);
  ++slot.arrived;
  pthread_cond_broadcast(&place().changed);
}

// False: given up.
bool await(const std::string& key, int size, const std::atomic<bool>& aborted, const Take& take) {
  const Locked locked;
  for (;;) {
    Slot& slot = slot_of(key);
    if (slot.arrived >= size) {
      if (take) take(slot.data);
      if (++slot.left == size) slot.key[0] = '\0';
      return true;
    }
    if (aborted) return false;
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 5'000'000;
    if (until.tv_nsec >= 1'000'000'000) until = {until.tv_sec + 1, until.tv_nsec - 1'000'000'000};
    pthread_cond_timedwait(&place().changed, &place().mutex, &until);
  }
}

// ---- communicators

struct Comm {
  std::uint64_t magic = 0x0280028002800280ULL;  // as the real one begins
  std::string key;
  int rank = 0;
  int size = 0;
  Config config;  // the job may find the flag by the name beside it, and change it
  int device = 0;
  std::atomic<int> state{kSuccess};
  std::atomic<bool> aborted{false};
  std::atomic<bool> destroyed{false};
  std::mutex mutex;
  bool connected = false;
  int splits = 0;
  int grows = 0;
  std::map<std::string, std::uint64_t> lanes;
  std::map<int, std::int64_t> reductions;
  std::atomic<int> busy{0};  // threads of its own
  std::atomic<int> graphs{0};  // captured calls whose graphs live
  std::map<std::string, std::uint64_t> captured;  // calls, by lane
  void* event = nullptr;  // of the driver; gone with the communicator
  std::uint64_t capture = 0;  // the last one that waits for the event
  std::uint64_t last = 0x0280028002800280ULL;  // and ends

  bool blocking() const { return __atomic_load_n(&config.blocking, __ATOMIC_ACQUIRE) != 0; }
};

std::atomic<int> made_reductions{0};

Comm& used(void* handle, const char* api) {
  auto* comm = static_cast<Comm*>(handle);
  if (comm == nullptr || comm->magic != 0x0280028002800280ULL || comm->destroyed) {
    std::fprintf(stderr, "fake NCCL: %s with what is no communicator, or no more\n", api);
    std::abort();
  }
  return *comm;
}

int beside(Comm& comm, std::function<int()> work) {
  if (comm.blocking()) return work();
  comm.state = kInProgress;
  ++comm.busy;
  std::thread([&comm, work = std::move(work)] {
    const int result = work();
    comm.state = result;
    --comm.busy;
  }).detach();
  return kInProgress;
}

std::string hexadecimal(const UniqueId& id) {
  std::string text;
  for (int i = 0; i < 8; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(id.internal[i]));
    text += two;
  }
  return text;
}

void configure(Comm& comm, const void* given, const Comm* parent) {
  if (given == nullptr) {
    if (parent == nullptr) return;
    comm.config.name = parent->config.name;
    comm.config.blocking = parent->blocking() ? 1 : 0;
    return;
  }
  const auto* config = static_cast<const Config*>(given);
  comm.config.blocking = config->blocking != 0 ? 1 : 0;
  if (config->size >= sizeof(Config)) comm.config.name = config->name;
}

// ---- operations

struct Op {
  Comm* comm;
  void* stream;
  std::string key;
  int size;
  Put put;
  Take take;
  bool collective;
};
// In the threads' own block: memory that the loader gives to each is taken back by other threads, which the thread
// sanitizer does not understand.
#define IN_THREAD thread_local __attribute__((tls_model("initial-exec")))
IN_THREAD int depth = 0;
IN_THREAD std::vector<Op> group;
IN_THREAD std::vector<std::function<int()>> group_jobs;  // creations, ends

int (*launch_host(void))(void*, void (*)(void*), void*) {
  static auto* const found = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = driver == nullptr ? nullptr : dlsym(driver, "cuLaunchHostFunc");
    if (symbol == nullptr) std::abort();
    return reinterpret_cast<int (*)(void*, void (*)(void*), void*)>(symbol);
  }();
  return found;
}

void run_ops(void* data) {
  const std::unique_ptr<std::vector<Op>> ops(static_cast<std::vector<Op>*>(data));
  for (const Op& op : *ops) arrive(op.key, op.put);
  for (const Op& op : *ops) await(op.key, op.size, op.comm->aborted, op.take);
}

// ---- captured operations

template <typename Function>
Function* driver_function(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return driver == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(driver, name));
}

// What is captured of one call, or of a group, on one stream. Its first word is what a kernel of the fake driver calls.
struct Plan {
  void (*check)(void*);
  std::vector<Op> ops;
  std::atomic<bool> reclaimed{false};
  std::uint64_t replays = 0;
};

void check_plan(void* data) {
  auto* plan = static_cast<Plan*>(data);
  for (const Op& op : plan->ops) {
    if (!plan->reclaimed && !op.comm->destroyed) continue;
    std::fprintf(stderr, "fake NCCL: a graph runs with what is left of a communicator that was destroyed\n");
    std::abort();
  }
}

void run_plan(void* data) {
  auto* plan = static_cast<Plan*>(data);
  check_plan(plan);
  const std::string replay = ":" + std::to_string(plan->replays++);
  for (const Op& op : plan->ops) arrive(op.key + replay, op.put);
  for (const Op& op : plan->ops) await(op.key + replay, op.size, op.comm->aborted, op.take);
}

// The graphs that hold the plan are gone. The plan is kept, so that a later use is seen.
void reclaim(void* data) {
  auto* plan = static_cast<Plan*>(data);
  plan->reclaimed = true;
  for (const Op& op : plan->ops) --op.comm->graphs;
}

std::atomic<int> kernels_in_a_call{1};

// The capture's number, and its graph; 0: none, or a driver without graphs.
std::uint64_t capture_of(void* stream, void** graph) {
  auto* ask = driver_function<int(void*, int*, std::uint64_t*, void**, const void**, std::size_t*)>(
      "cuStreamGetCaptureInfo_v2");
  int status = 0;
  std::uint64_t id = 0;
  if (ask == nullptr || ask(stream, &status, &id, graph, nullptr, nullptr) != 0 || status != 1) return 0;
  return id;
}

void captured(void* stream, std::uint64_t id, void* graph, const std::vector<Op>& ops) {
  auto* plan = new Plan{check_plan, ops};
  Comm& comm = *ops.front().comm;
  const auto need = [](int result) {
    if (result != 0) std::abort();
  };
  for (Op& op : plan->ops) {
    ++op.comm->graphs;
    const std::lock_guard lock(op.comm->mutex);
    // In each replay its partners are the calls that all members captured as their n-th.
    const std::string lane = op.key.substr(op.comm->key.size(), op.key.rfind(':') - op.comm->key.size());
    --op.comm->lanes[lane.substr(1)];  // it is none of the calls that are made one after another
    op.key = op.comm->key + lane + ":g" + std::to_string(op.comm->captured[lane]++);
  }
  if (comm.event == nullptr) need(driver_function<int(void**, unsigned)>("cuEventCreate")(&comm.event, 2));
  if (std::exchange(comm.capture, id) != id) {
    void* node = nullptr;
    need(driver_function<int(void**, void*, void**, std::size_t, void*)>("cuGraphAddEventWaitNode")(
        &node, graph, nullptr, 0, comm.event));
    need(driver_function<int(void*, void**, std::size_t, unsigned)>("cuStreamUpdateCaptureDependencies")(stream, &node,
                                                                                                        1, 0));
  }
  need(driver_function<int(void*, void (*)(void*), void*)>("cuLaunchHostFunc")(stream, run_plan, plan));
  void* module = nullptr;
  void* kernel = nullptr;
  need(driver_function<int(void**, const void*)>("cuModuleLoadData")(&module, ""));
  need(driver_function<int(void**, void*, const char*)>("cuModuleGetFunction")(&kernel, module, "nccl"));
  void* arguments[] = {&plan};
  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  for (int i = 0; i < kernels_in_a_call; ++i) {
    need(driver_function<Launch>("cuLaunchKernel")(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
  }
  int status = 0;
  void** before = nullptr;
  std::size_t count = 0;
  need(driver_function<int(void*, int*, std::uint64_t*, void**, void***, std::size_t*)>("cuStreamGetCaptureInfo_v2")(
      stream, &status, nullptr, nullptr, &before, &count));
  std::vector<void*> dependencies(before, before + count);
  void* record = nullptr;
  need(driver_function<int(void**, void*, void**, std::size_t, void*)>("cuGraphAddEventRecordNode")(
      &record, graph, dependencies.data(), count, comm.event));
  void* object = nullptr;
  need(driver_function<int(void**, void*, void (*)(void*), unsigned, unsigned)>("cuUserObjectCreate")(&object, plan,
                                                                                                    reclaim, 1, 1));
  need(driver_function<int(void*, void*, unsigned, unsigned)>("cuGraphRetainUserObject")(graph, object, 1, 1));
}

// All members of a communicator, several of which may be in one group of one thread.
bool connect(const std::vector<Comm*>& comms) {
  for (const Comm* comm : comms) arrive(comm->key + ":connect", nullptr);
  bool well = true;
  for (const Comm* comm : comms) well = await(comm->key + ":connect", comm->size, comm->aborted, nullptr) && well;
  return well;
}

int launch(std::vector<Op> ops) {
  if (ops.empty()) return kSuccess;
  std::vector<Comm*> fresh;
  for (const Op& op : ops) {
    const std::lock_guard lock(op.comm->mutex);
    if (op.collective && !std::exchange(op.comm->connected, true)) fresh.push_back(op.comm);
  }
  void* context = nullptr;
  driver_function<int(void**)>("cuCtxGetCurrent")(&context);
  auto go = [ops, fresh, context] {
    driver_function<int(void*)>("cuCtxSetCurrent")(context);  // a thread of NCCL's own has the caller's device
    if (!connect(fresh)) return static_cast<int>(kSystemError);
    std::map<void*, std::vector<Op>> streams;
    for (const Op& op : ops) streams[op.stream].push_back(op);
    for (auto& [stream, its] : streams) {
      void* graph = nullptr;
      if (const std::uint64_t capture = capture_of(stream, &graph)) {
        captured(stream, capture, graph, its);
      } else {
        launch_host()(stream, run_ops, new std::vector<Op>(its));
      }
    }
    return static_cast<int>(kSuccess);
  };
  return fresh.empty() ? go() : beside(*ops.front().comm, go);
}

int issue(Op op) {
  if (!op.comm->blocking() && op.comm->config.name != nullptr && std::strcmp(op.comm->config.name, "moorage") == 0) {
    std::fprintf(stderr, "fake NCCL: a communicator of a job that has said nothing does not block\n");
    std::abort();
  }
  if (depth > 0) {
    group.push_back(std::move(op));
    return kSuccess;
  }
  return launch({std::move(op)});
}

std::string next(Comm& comm, const std::string& lane) {
  const std::lock_guard lock(comm.mutex);
  return comm.key + ":" + lane + ":" + std::to_string(comm.lanes[lane]++);
}

using Combine = std::function<void(std::int64_t*, const std::int64_t*, std::size_t, bool first)>;

int collective(void* handle, const char* api, const void* send, std::size_t offset, std::size_t put, void* receive,
               std::size_t from, std::size_t count, int type, void* stream, const Combine& combine) {
  Comm& comm = used(handle, api);
  if (type != kInt64 || (offset + put) * 8 > kBytes) return kInvalidArgument;
  Op op{&comm, stream, next(comm, "c"), comm.size, nullptr, nullptr, true};
  op.put = [=](char* data, bool first) {
    combine(reinterpret_cast<std::int64_t*>(data) + offset, static_cast<const std::int64_t*>(send), put, first);
  };
  op.take = [=](const char* data) {
    if (receive != nullptr) std::memcpy(receive, reinterpret_cast<const std::int64_t*>(data) + from, count * 8);
  };
  return issue(std::move(op));
}

void copy(std::int64_t* to, const std::int64_t* from, std::size_t count, bool) { std::memcpy(to, from, count * 8); }

}  // namespace

// How many kernels a captured call takes from now on: another algorithm.
FAKE void fakeNcclKernels(int count) { kernels_in_a_call = count; }

// ---- the beginning and end of communicators

FAKE int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
FAKE const char* ncclGetErrorString(int) { return "fake error"; }
FAKE const char* ncclGetLastError(void*) { return "no last error"; }

FAKE int ncclGetUniqueId(UniqueId* id) {
  return getrandom(id, sizeof *id, 0) == sizeof *id ? kSuccess : kSystemError;
}

FAKE int ncclCommInitRankConfig(void** out, int ranks, UniqueId id, int rank, void* config) {
  auto* comm = new Comm;
  comm->key = hexadecimal(id);
  comm->rank = rank;
  comm->size = ranks;
  configure(*comm, config, nullptr);
  *out = comm;
  auto work = [comm] {
    const std::string key = comm->key + ":init";
    arrive(key, nullptr);
    return static_cast<int>(await(key, comm->size, comm->aborted, nullptr) ? kSuccess : kSystemError);
  };
  if (depth > 0 && comm->blocking()) {
    group_jobs.emplace_back(work);
    return kSuccess;
  }
  return beside(*comm, work);
}
FAKE int ncclCommInitRank(void** out, int ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}

FAKE int ncclCommSplit(void* handle, int color, int key, void** out, void* config) {
  Comm& parent = used(handle, "ncclCommSplit");
  auto* comm = color < 0 ? nullptr : new Comm;
  const std::string meeting = parent.key + ":split:" + std::to_string(parent.splits++);
  if (comm != nullptr) configure(*comm, config, &parent);
  *out = comm;
  auto work = [&parent, comm, color, key, meeting] {
    arrive(meeting, [&](char* data, bool) {
      auto* all = reinterpret_cast<int*>(data);
      all[2 * parent.rank] = color;
      all[2 * parent.rank + 1] = key;
    });
    const bool met = await(meeting, parent.size, comm == nullptr ? parent.aborted : comm->aborted, [&](const char* data) {
      if (comm == nullptr) return;
      const auto* all = reinterpret_cast<const int*>(data);
      for (int other = 0; other < parent.size; ++other) {
        if (all[2 * other] != color) continue;
        ++comm->size;
        const int theirs = all[2 * other + 1];
        if (theirs < key || (theirs == key && other < parent.rank)) ++comm->rank;
      }
      comm->key = meeting + "." + std::to_string(color);
    });
    return static_cast<int>(met ? kSuccess : kSystemError);
  };
  return beside(comm == nullptr ? parent : *comm, work);
}

FAKE int ncclCommShrink(void* handle, int* excluded, int count, void** out, void* config, int) {
  Comm& parent = used(handle, "ncclCommShrink");
  auto* comm = new Comm;
  configure(*comm, config, &parent);
  comm->size = parent.size - count;
  comm->rank = parent.rank;
  comm->key = parent.key + ":shrink";
  for (int i = 0; i < count; ++i) {
    comm->key += "." + std::to_string(excluded[i]);
    if (excluded[i] < parent.rank) --comm->rank;
  }
  *out = comm;
  return beside(*comm, [comm] {
    const std::string key = comm->key + ":init";
    arrive(key, nullptr);
    return static_cast<int>(await(key, comm->size, comm->aborted, nullptr) ? kSuccess : kSystemError);
  });
}

// Of the members that are there one has the id, and the others learn it from that one.
FAKE int ncclCommGetUniqueId(void* handle, UniqueId* id) {
  used(handle, "ncclCommGetUniqueId");
  std::memset(id, 0, sizeof *id);
  return getrandom(id, 40, 0) == 40 ? kSuccess : kSystemError;
}
FAKE int ncclCommGrow(void* handle, int ranks, const UniqueId* id, int rank, void** out, void* config) {
  Comm* parent = handle == nullptr ? nullptr : &used(handle, "ncclCommGrow");
  if (parent == nullptr ? id == nullptr || rank < 0 : rank != -1 || ranks <= parent->size) return kInvalidArgument;
  for (std::size_t i = 40; id != nullptr && i < sizeof id->internal; ++i) {
    if (id->internal[i] != 0) return kInvalidArgument;  // not as it was drawn
  }
  auto* comm = new Comm;
  comm->size = ranks;
  comm->rank = parent == nullptr ? rank : parent->rank;
  configure(*comm, config, parent);
  const std::string known = id == nullptr ? "" : hexadecimal(*id);
  const std::string meeting = parent == nullptr ? "" : parent->key + ":grow:" + std::to_string(parent->grows++);
  const int size = parent == nullptr ? 0 : parent->size;
  *out = comm;
  return beside(*comm, [comm, known, meeting, size] {
    comm->key = known;
    if (!meeting.empty()) {
      arrive(meeting, [&](char* data, bool) {
        if (!known.empty()) std::strcpy(data, known.c_str());
      });
      if (!await(meeting, size, comm->aborted, [comm](const char* data) { comm->key = data; })) {
        return static_cast<int>(kSystemError);
      }
    }
    const std::string key = comm->key + ":init";
    arrive(key, nullptr);
    return static_cast<int>(await(key, comm->size, comm->aborted, nullptr) ? kSuccess : kSystemError);
  });
}

FAKE int ncclCommFinalize(void* handle) {
  Comm& comm = used(handle, "ncclCommFinalize");
  return beside(comm, [&comm] {
    const std::string key = comm.key + ":finalize";
    arrive(key, nullptr);
    return static_cast<int>(await(key, comm.size, comm.aborted, nullptr) ? kSuccess : kSystemError);
  });
}
FAKE int ncclCommDestroy(void* handle) {
  Comm& comm = used(handle, "ncclCommDestroy");
  while (comm.busy > 0 || comm.graphs > 0) std::this_thread::yield();
  if (comm.event != nullptr) driver_function<int(void*)>("cuEventDestroy_v2")(comm.event);
  comm.destroyed = true;  // kept, so that a later use is seen
  return kSuccess;
}
FAKE int ncclCommAbort(void* handle) {
  Comm& comm = used(handle, "ncclCommAbort");
  comm.aborted = true;
  return ncclCommDestroy(handle);
}
FAKE int ncclCommGetAsyncError(void* handle, int* state) {
  *state = used(handle, "ncclCommGetAsyncError").state;
  return kSuccess;
}
FAKE int ncclCommCount(void* handle, int* out) {
  *out = used(handle, "ncclCommCount").size;
  return kSuccess;
}
FAKE int ncclCommUserRank(void* handle, int* out) {
  *out = used(handle, "ncclCommUserRank").rank;
  return kSuccess;
}
FAKE int ncclCommCuDevice(void* handle, int* out) {
  *out = used(handle, "ncclCommCuDevice").device;
  return kSuccess;
}

// ---- what hangs on them

FAKE int ncclCommRegister(void* handle, void*, std::size_t, void** out) {
  used(handle, "ncclCommRegister");
  *out = new int;
  return kSuccess;
}
FAKE int ncclCommDeregister(void* handle, void* registration) {
  used(handle, "ncclCommDeregister");
  delete static_cast<int*>(registration);
  return kSuccess;
}
FAKE int ncclCommWindowRegister(void* handle, void* buffer, std::size_t, void** out, int) {
  used(handle, "ncclCommWindowRegister");
  *out = new void*(buffer);
  return kSuccess;
}
FAKE int ncclCommWindowDeregister(void* handle, void* window) {
  used(handle, "ncclCommWindowDeregister");
  delete static_cast<void**>(window);
  return kSuccess;
}
FAKE int ncclWinGetUserPtr(void* handle, void* window, void** out) {
  used(handle, "ncclWinGetUserPtr");
  *out = *static_cast<void**>(window);
  return kSuccess;
}
FAKE int ncclRedOpCreatePreMulSum(int* out, void* scalar, int type, int, void* handle) {
  Comm& comm = used(handle, "ncclRedOpCreatePreMulSum");
  if (type != kInt64) return kInvalidArgument;
  const std::lock_guard lock(comm.mutex);
  *out = 1000 + ++made_reductions;  // another one each time
  comm.reductions[*out] = *static_cast<std::int64_t*>(scalar);
  return kSuccess;
}
FAKE int ncclRedOpDestroy(int reduction, void* handle) {
  Comm& comm = used(handle, "ncclRedOpDestroy");
  const std::lock_guard lock(comm.mutex);
  return comm.reductions.erase(reduction) == 1 ? kSuccess : kInvalidArgument;
}
FAKE int ncclMemAlloc(void** out, std::size_t size) {
  *out = std::malloc(size);
  return kSuccess;
}
FAKE int ncclMemFree(void* memory) {
  std::free(memory);
  return kSuccess;
}

// ---- operations

FAKE int ncclAllReduce(const void* send, void* receive, std::size_t count, int type, int reduction, void* handle,
                       void* stream) {
  Comm& comm = used(handle, "ncclAllReduce");
  int rank = -1;
  // NCCL calls some of its own functions as everybody does, and may meet a proxy there.
  if (ncclCommUserRank(handle, &rank) != kSuccess || rank != comm.rank) std::abort();
  std::int64_t factor = 1;
  if (reduction != 0) {
    const std::lock_guard lock(comm.mutex);
    const auto known = comm.reductions.find(reduction);
    if (known == comm.reductions.end()) return kInvalidArgument;
    factor = known->second;
  }
  return collective(handle, "ncclAllReduce", send, 0, count, receive, 0, count, type, stream,
                    [factor](std::int64_t* to, const std::int64_t* from, std::size_t n, bool first) {
                      for (std::size_t i = 0; i < n; ++i) to[i] = (first ? 0 : to[i]) + factor * from[i];
                    });
}
FAKE int ncclBroadcast(const void* send, void* receive, std::size_t count, int type, int root, void* handle,
                       void* stream) {
  const bool mine = used(handle, "ncclBroadcast").rank == root;
  return collective(handle, "ncclBroadcast", send, 0, mine ? count : 0, receive, 0, count, type, stream, copy);
}
FAKE int ncclAllGather(const void* send, void* receive, std::size_t count, int type, void* handle, void* stream) {
  const Comm& comm = used(handle, "ncclAllGather");
  return collective(handle, "ncclAllGather", send, static_cast<std::size_t>(comm.rank) * count, count, receive, 0,
                    static_cast<std::size_t>(comm.size) * count, type, stream, copy);
}
FAKE int ncclSend(const void* send, std::size_t count, int type, int peer, void* handle, void* stream) {
  Comm& comm = used(handle, "ncclSend");
  if (type != kInt64) return kInvalidArgument;
  const std::string lane = std::to_string(comm.rank) + ">" + std::to_string(peer);
  Op op{&comm, stream, next(comm, lane), 2, nullptr, nullptr, false};
  op.put = [=](char* data, bool) { std::memcpy(data, send, count * 8); };
  return issue(std::move(op));
}
FAKE int ncclRecv(void* receive, std::size_t count, int type, int peer, void* handle, void* stream) {
  Comm& comm = used(handle, "ncclRecv");
  if (type != kInt64) return kInvalidArgument;
  const std::string lane = std::to_string(peer) + ">" + std::to_string(comm.rank);
  Op op{&comm, stream, next(comm, lane), 2, nullptr, nullptr, false};
  op.take = [=](const char* data) { std::memcpy(receive, data, count * 8); };
  return issue(std::move(op));
}

FAKE int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
FAKE int ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  if (--depth > 0) return kSuccess;
  std::vector<std::thread> threads;
  std::atomic<int> result{kSuccess};
  for (auto& job : group_jobs) {
    threads.emplace_back([&result, job] {
      if (const int bad = job(); bad != kSuccess) result = bad;
    });
  }
  group_jobs.clear();
  for (auto& thread : threads) thread.join();
  const int launched = launch(std::exchange(group, {}));
  return result != kSuccess ? result.load() : launched;
}
FAKE int ncclGroupSimulateEnd(void*) {
  depth = 0;
  group.clear();
  return kSuccess;
}
