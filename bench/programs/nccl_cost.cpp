// `nccl_cost LIBRARY CALLS`: nanoseconds for one all-reduce, and for a group of a send and a receive, on one line.
#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

struct UniqueId {
  char internal[128];
};

template <typename Function>
Function* found(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) std::exit(2);
  return reinterpret_cast<Function*>(symbol);
}

template <typename Work>
double each(long calls, Work work) {
  const auto begin = std::chrono::steady_clock::now();
  for (long i = 0; i < calls; ++i) work();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  return took.count() / static_cast<double>(calls);
}

int main(int, char** arguments) {
  if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return 2;
  const long calls = std::atol(arguments[2]);
  void* comm = nullptr;
  void* const stream = &comm;
  if (found<int(void**, int, UniqueId, int)>(library, "ncclCommInitRank")(&comm, 2, {}, 0) != 0) return 3;
  auto* reduce = found<int(const void*, void*, std::size_t, int, int, void*, void*)>(library, "ncclAllReduce");
  auto* send = found<int(const void*, std::size_t, int, int, void*, void*)>(library, "ncclSend");
  auto* receive = found<int(void*, std::size_t, int, int, void*, void*)>(library, "ncclRecv");
  auto* start = found<int()>(library, "ncclGroupStart");
  auto* end = found<int()>(library, "ncclGroupEnd");
  const auto one = [&] { reduce(nullptr, nullptr, 1, 0, 0, comm, stream); };
  const auto group = [&] {
    start();
    send(nullptr, 1, 0, 1, comm, stream);
    receive(nullptr, 1, 0, 1, comm, stream);
    end();
  };
  each(calls / 10, one);
  each(calls / 10, group);
  std::printf("%.2f %.2f\n", each(calls, one), each(calls / 4, group));
  return 0;
}
