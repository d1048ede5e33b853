// Freed memory is kept and used again, counts as free, and is given back when it is in the way of anything.
#include <atomic>
#include <thread>

#include "job.h"

namespace {

constexpr std::size_t kSize = 4 * kMiB;

std::size_t said_free() {
  std::size_t free = 0;
  std::size_t total = 0;
  OK(cuMemGetInfo_v2(&free, &total));
  return free;
}

void the_same_block_again() {
  const std::size_t before = said_free();
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;
  CUdeviceptr base = 0;
  std::size_t size = 0;
  OK(cuMemAlloc_v2(&first, kSize));
  CHECK(said_free() == before - kSize);
  OK(cuMemFree_v2(first));
  CHECK(physical() == kSize && said_free() == before);
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(first));
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuMemGetInfo_v2(nullptr, nullptr));
  OK(cuMemAlloc_v2(&second, kSize - 100));
  CHECK(second == first && physical() == kSize);
  CHECK(last_call() != "cuMemCreate" && last_call() != "cuMemSetAccess");
  OK(cuMemGetAddressRange_v2(&base, &size, second + 5));
  CHECK(base == second && size == kSize - 100);
  CUdeviceptr other = 0;
  OK(cuMemAlloc_v2(&other, 2 * kSize));  // another size is another block
  CHECK(physical() == 3 * kSize);
  OK(cuMemFree_v2(second));
  OK(cuMemFree_v2(other));
  CHECK(said_free() == before);
}

void no_more_than_is_allowed() {  // 64 MiB
  CUdeviceptr memory[20] = {};
  for (CUdeviceptr& one : memory) OK(cuMemAlloc_v2(&one, kSize));
  for (const CUdeviceptr one : memory) OK(cuMemFree_v2(one));
  CHECK(physical() == 64 * kMiB);
  OK(cuMemAlloc_v2(&memory[0], 65 * kMiB));
  OK(cuMemFree_v2(memory[0]));
  CHECK(physical() == 64 * kMiB);
}

void given_back_when_memory_is_short() {
  CHECK(physical() == 64 * kMiB);
  CUdeviceptr large = 0;
  const std::size_t all = said_free();
  OK(cuMemAlloc_v2(&large, all));
  CHECK(physical() == all);
  OK(cuMemFree_v2(large));
  CHECK(physical() == 0);
}

void nothing_of_it_is_saved(Job& job) {
  CUdeviceptr kept = 0;
  CUdeviceptr freed[2] = {};
  OK(cuMemAlloc_v2(&kept, kSize));
  for (CUdeviceptr& one : freed) OK(cuMemAlloc_v2(&one, kSize));
  fill(kept, kSize, 42);
  job.wait_for_blocks(3);
  for (const CUdeviceptr one : freed) OK(cuMemFree_v2(one));
  CHECK(physical() == 3 * kSize);
  DONE(job.broker().quiesce(job.process, 10'000));
  CHECK(job.broker().kept().size() == 1 && physical() == kSize);
  DONE(job.broker().resume(job.process));
  job.round();
  holds(kept, kSize, 42);
  OK(cuMemFree_v2(kept));
  CHECK(physical() == kSize);
  job.round();  // an empty one
  CHECK(physical() == 0);
}

void a_block_that_came_back_is_kept_too(Job& job) {
  CUdeviceptr memory = 0;
  CUdeviceptr again = 0;
  OK(cuMemAlloc_v2(&memory, kSize));
  job.round();
  OK(cuMemFree_v2(memory));
  OK(cuMemAlloc_v2(&again, kSize));
  CHECK(again == memory);
  fill(again, kSize, 9);
  job.round();
  holds(again, kSize, 9);
  OK(cuMemFree_v2(again));
}

void gone_with_its_context(Job& job) {
  job.round();
  CUcontext own = nullptr;
  CUdeviceptr memory = 0;
  OK(cuCtxCreate_v2(&own, 0, 0));
  OK(cuMemAlloc_v2(&memory, kSize));
  OK(cuMemFree_v2(memory));
  CHECK(physical() == kSize);
  OK(cuCtxDestroy_v2(own));
  CHECK(physical() == 0);
}

void what_another_process_may_name_is_not_kept() {
  CUdeviceptr memory = 0;
  CUipcMemHandle handle;
  OK(cuMemAlloc_v2(&memory, kSize));
  OK(cuIpcGetMemHandle(&handle, memory));
  OK(cuMemFree_v2(memory));
  CHECK(physical() == 0);
}

void threads_that_allocate_while_checkpoints_come(Job& job) {
  std::atomic<bool> stop{false};
  CUcontext context = nullptr;
  OK(cuCtxGetCurrent(&context));
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 3; ++number) {
    threads.emplace_back([&, number] {
      OK(cuCtxSetCurrent(context));
      for (unsigned turn = 0; !stop; ++turn) {
        CUdeviceptr one = 0;
        CUdeviceptr two = 0;
        OK(cuMemAlloc_v2(&one, 2 * kMiB));
        OK(cuMemAlloc_v2(&two, (1 + turn % 3) * 2 * kMiB));
        CHECK(one != two);
        fill(one, 4096, number * 1000 + turn);
        fill(two, 4096, turn);
        holds(one, 4096, number * 1000 + turn);
        OK(cuMemFree_v2(one));
        OK(cuMemFree_v2(two));
      }
    });
  }
  for (int turn = 0; turn < 3; ++turn) {
    DONE(job.broker().quiesce(job.process, 20'000));
    for (const auto& [key, kept] : job.broker().kept()) CHECK(!kept.descriptors.empty());
    const std::size_t blocks = job.broker().kept().size();
    DONE(job.broker().evict(job.process));
    job.come_back(blocks);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  setenv("MOORAGE_GPU_CACHE", "64", 1);
  Job job;
  the_same_block_again();
  no_more_than_is_allowed();
  given_back_when_memory_is_short();
  nothing_of_it_is_saved(job);
  a_block_that_came_back_is_kept_too(job);
  gone_with_its_context(job);
  what_another_process_may_name_is_not_kept();
  threads_that_allocate_while_checkpoints_come(job);
  CHECK(beyond<int()>("fakeUnmapsWhileBusy")() == 0);
  unlink(socket_path().c_str());
  std::_Exit(0);
}
