// A job with a broker, for the programs that look at bulk memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "broker.h"

inline constexpr std::size_t kMiB = std::size_t{1} << 20U;

inline std::size_t physical() { return beyond<std::size_t()>("fakePhysicalBytes")(); }
inline std::size_t plain() { return beyond<std::size_t()>("fakePlainBytes")(); }
inline std::string last_call() { return beyond<const char*()>("fakeLastCall")(); }

inline void fill(CUdeviceptr memory, std::size_t bytes, unsigned value) { OK(cuMemsetD32_v2(memory, value, bytes / 4)); }

inline void holds(CUdeviceptr memory, std::size_t bytes, unsigned value) {
  std::vector<unsigned> words(bytes / 4);
  OK(cuMemcpyDtoH_v2(words.data(), memory, bytes));
  for (const unsigned word : words) CHECK(word == value);
}

class Job {
 public:
  Job() : broker_(std::make_unique<Broker>(socket_path())) {
    setenv("MOORAGE_GPU_SOCKET", socket_path().c_str(), 1);
    begin();
    process = broker_->hello().process;
    broker_->welcome(process, 7);
  }

  // Everything from the device and back, by another broker, as after a move.
  void round() {
    DONE(broker_->quiesce(process, 10'000));
    const std::size_t before = physical() - plain();
    const std::size_t blocks = broker_->kept().size();
    DONE(broker_->evict(process));
    come_back(blocks);
    CHECK(physical() - plain() == before);
    CHECK(beyond<int()>("fakeUnmapsWhileBusy")() == 0);
  }

  // The process was evicted with so many blocks: another broker brings them back.
  void come_back(std::size_t blocks) {
    const auto kept = broker_->kept();
    broker_->gone(process);
    CHECK(physical() == plain());
    broker_ = std::make_unique<Broker>(socket_path());
    broker_->give(kept);
    const wire::Hello hello = broker_->hello(process);
    CHECK(hello.evicted == 1 && hello.level == 3 && hello.incarnation == 7);
    CHECK(broker_->map(process).status == (blocks == 0 ? 0 : wire::kIncomplete));
    CHECK(blocks == 0 || broker_->resume(process).status == wire::kWrongState);
    broker_->adopt(process);
    if (blocks != 0) DONE(broker_->map(process));
    DONE(broker_->resume(process));
  }

  Broker& broker() { return *broker_; }
  void wait_for_blocks(std::size_t count) {
    broker_->wait_for([&](const auto& kept) { return kept.size() == count; });
  }

  std::uint64_t process = 0;

 private:
  std::unique_ptr<Broker> broker_;
};
