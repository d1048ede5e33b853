// The gate: closes although threads wait, call back and capture; says who is in the way when it cannot; and opens.
#include <atomic>
#include <chrono>
#include <memory>

#include "broker.h"

namespace {

using namespace std::chrono_literals;

std::unique_ptr<Broker> broker;
std::uint64_t process = 0;
CUcontext context = nullptr;

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "not \"%s\" in \"%s\"\n", part.c_str(), text.c_str());
  return false;
}

bool says(const std::string& part) { return broker->status(process).text.find(part) != std::string::npos; }

// A thread that uses CUDA until it is told to stop.
class Worker {
 public:
  template <typename Step>
  explicit Worker(Step step) : thread_([this, step] {
    OK(cuCtxSetCurrent(context));
    while (!stop_) {
      step();
      ++steps_;
    }
  }) {}
  ~Worker() {
    stop_ = true;
    thread_.join();
  }
  int steps() const { return steps_; }
  void make_steps(int count) const {
    const int wanted = steps_ + count;
    while (steps_ < wanted) std::this_thread::sleep_for(1ms);
  }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int> steps_{0};
  std::thread thread_;
};

void under_load() {
  CUstream streams[100];
  for (CUstream& stream : streams) OK(cuStreamCreate(&stream, 0));
  {
    Worker launches([&] {
      for (CUstream stream : streams) {
        int ms = 0;
        OK(launch("spin", stream, &ms));
      }
    });
    Worker waits([&] {
      const CUresult result = cuCtxSynchronize();  // which the driver refuses while a stream is captured
      CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    });
    Worker allocates([&] {
      CUdeviceptr memory = 0;
      OK(cuMemAlloc_v2(&memory, std::size_t{4} << 20U));
      OK(cuMemsetD32_v2(memory, 1, 1000));
      OK(cuMemFree_v2(memory));
    });
    Worker captures([&] {
      CUgraph graph = nullptr;
      CUstream own = nullptr;
      OK(cuStreamCreate(&own, 0));
      if (cuStreamBeginCapture_v2(own, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == CUDA_SUCCESS) {
        int ms = 0;
        OK(launch("spin", own, &ms));
        OK(cuStreamEndCapture(own, &graph));
        OK(cuGraphDestroy(graph));
      }
      OK(cuStreamDestroy_v2(own));
    });
    for (int round = 0; round < 20; ++round) {
      captures.make_steps(2);
      DONE(broker->quiesce(process, 60'000));
      const int before = launches.steps() + allocates.steps() + captures.steps();
      std::this_thread::sleep_for(5ms);
      const int after = launches.steps() + allocates.steps() + captures.steps();
      CHECK(after - before <= 3);  // a step that had made its last call may still count itself
      CHECK(contains(broker->status(process).text, "\"level\":3"));
      DONE(broker->resume(process));
      launches.make_steps(1);
    }
  }
  for (CUstream stream : streams) OK(cuStreamDestroy_v2(stream));
}

// A kernel that waits for the host, until the host lets it end.
struct Endless {
  Endless() {
    OK(cuStreamCreate(&stream, 0));
    std::atomic<int>* address = &flag;
    OK(launch("wait", stream, &address));
  }
  ~Endless() {
    flag = 1;
    OK(cuStreamDestroy_v2(stream));
  }
  std::atomic<int> flag{0};
  CUstream stream = nullptr;
};

// The try that came to its deadline may still have a thread that comes back from the device.
void quiesce_after_a_failure() {
  for (;;) {
    const Broker::Done done = broker->quiesce(process, 30'000);
    if (done.status == 0) return;
    CHECK(done.status == wire::kWrongState);
  }
}

void work_that_does_not_end() {
  Endless endless;
  const Broker::Done done = broker->quiesce(process, 200);
  CHECK(done.status == wire::kDeadline);
  CHECK(contains(done.text, "work has not ended in the primary context of device 0"));
  OK(cuStreamQuery(nullptr));  // the gate is open
  CHECK(broker->quiesce(process, 100).status == wire::kWrongState);
  endless.flag = 1;
  quiesce_after_a_failure();
  DONE(broker->resume(process));
}

void a_thread_that_only_waits_is_no_hindrance() {
  CUevent event = nullptr;
  auto endless = std::make_unique<Endless>();
  OK(cuEventCreate(&event, 0));
  OK(cuEventRecord(event, endless->stream));
  std::thread waiter([&] {
    OK(cuCtxSetCurrent(context));
    OK(cuEventSynchronize(event));
  });
  while (!says("\"waiting\":1")) std::this_thread::sleep_for(1ms);
  // It is the work that keeps the gate from being sealed, not the thread.
  const Broker::Done done = broker->quiesce(process, 100);
  CHECK(done.status == wire::kDeadline && contains(done.text, "work has not ended"));
  endless.reset();
  waiter.join();
  OK(cuEventDestroy_v2(event));
  quiesce_after_a_failure();
  DONE(broker->resume(process));
}

void a_thread_in_a_call_is_named() {
  CUdeviceptr memory = 0;
  OK(cuMemAlloc_v2(&memory, 4096));
  std::atomic<int> flag{0};
  std::atomic<int>* address = &flag;
  OK(launch("wait", nullptr, &address));
  std::thread copies([&] {
    pthread_setname_np(pthread_self(), "the-copier");
    OK(cuCtxSetCurrent(context));
    int value = 0;
    OK(cuMemcpyDtoH_v2(&value, memory, sizeof value));
  });
  while (!says("\"inside\":1")) std::this_thread::sleep_for(1ms);
  const Broker::Done done = broker->quiesce(process, 100);
  CHECK(done.status == wire::kDeadline && contains(done.text, "(the-copier) is in cuMemcpyDtoH_v2"));
  flag = 1;
  copies.join();
  OK(cuMemFree_v2(memory));
}

std::atomic<int> calls{0};

void call_back(void*) {
  std::this_thread::sleep_for(20ms);
  CUcontext none = nullptr;
  OK(cuCtxGetCurrent(&none));  // held for ever, if it were taken for a thread of the job's own
  ++calls;
}

void callbacks_may_call() {
  CUstream stream = nullptr;
  OK(cuStreamCreate(&stream, 0));
  for (int i = 0; i < 5; ++i) OK(cuLaunchHostFunc(stream, call_back, nullptr));
  quiesce_after_a_failure();
  CHECK(calls == 5);
  DONE(broker->resume(process));
  OK(cuStreamDestroy_v2(stream));
}

void captures_come_to_their_end() {
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  OK(cuStreamCreate(&stream, 0));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  std::thread ends([&] {
    std::this_thread::sleep_for(50ms);
    OK(cuCtxSetCurrent(context));
    int ms = 0;
    OK(launch("spin", stream, &ms));
    OK(cuStreamEndCapture(stream, &graph));
  });
  DONE(broker->quiesce(process, 30'000));
  DONE(broker->resume(process));
  ends.join();
  OK(cuGraphDestroy(graph));

  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  const Broker::Done done = broker->quiesce(process, 100);
  CHECK(done.status == wire::kDeadline && contains(done.text, "1 stream captures have not ended"));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphDestroy(graph));
  OK(cuStreamDestroy_v2(stream));
}

void orders_out_of_order() {
  CHECK(broker->evict(process).status == wire::kWrongState);
  CHECK(broker->map(process).status == wire::kWrongState);
  DONE(broker->resume(process));
  DONE(broker->quiesce(process, 10'000));
  CHECK(broker->quiesce(process, 10'000).status == wire::kWrongState);
  DONE(broker->resume(process));
}

void a_broker_that_dies_leaves_a_job_that_runs() {
  CUdeviceptr memory = 0;
  OK(cuMemAlloc_v2(&memory, std::size_t{2} << 20U));
  Worker runs([] { OK(cuStreamQuery(nullptr)); });
  quiesce_after_a_failure();
  broker.reset();
  runs.make_steps(3);
  // Without a broker memory is had all the same, and told to the next one with all the rest.
  CUdeviceptr more = 0;
  OK(cuMemAlloc_v2(&more, std::size_t{2} << 20U));
  broker = std::make_unique<Broker>(socket_path());
  CHECK(broker->hello(process).evicted == 0);
  broker->wait_for([](const auto& kept) {
    if (kept.size() != 2) return false;
    for (const auto& [key, one] : kept) {
      if (one.descriptors.empty()) return false;
    }
    return true;
  });
  OK(cuMemFree_v2(memory));
  OK(cuMemFree_v2(more));
  broker->wait_for([](const auto& kept) { return kept.empty(); });
}

}  // namespace

int main() {
  broker = std::make_unique<Broker>(socket_path());
  setenv("MOORAGE_GPU_SOCKET", socket_path().c_str(), 1);
  context = begin();
  process = broker->hello().process;
  orders_out_of_order();
  under_load();
  work_that_does_not_end();
  a_thread_that_only_waits_is_no_hindrance();
  a_thread_in_a_call_is_named();
  callbacks_may_call();
  captures_come_to_their_end();
  a_broker_that_dies_leaves_a_job_that_runs();
  unlink(socket_path().c_str());
  std::_Exit(0);
}
