// A small GPU broker for tests: keeps descriptors, answers requests, gives orders. One thread for each connection.
#pragma once

#include <linux/kcmp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../native/intercept/wire.h"
#include "check.h"

namespace wire = moorage::wire;

class Broker {
 public:
  using Key = std::pair<std::uint64_t, std::uint64_t>;
  struct Kept {
    wire::Memory about{};
    std::vector<int> descriptors;
  };
  struct Done {
    std::int32_t status = 0;
    std::uint32_t count = 0;
    std::uint64_t bytes = 0;
    std::string text;
  };

  explicit Broker(std::string path) : path_(std::move(path)) {
    unlink(path_.c_str());
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    CHECK(listen(listener_, 16) == 0);
    acceptor_ = std::thread([this] { accept_all(); });
  }

  // As if it were killed: all connections break. What it kept stays in kept(), as the worker keeps it.
  ~Broker() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    close(listener_);
    std::vector<std::thread> readers;
    {
      const std::lock_guard lock(mutex_);
      for (auto& [fd, process] : open_) shutdown(fd, SHUT_RDWR);
      readers = std::move(readers_);
    }
    for (std::thread& reader : readers) reader.join();
    for (const int fd : dead_) close(fd);
  }

  Broker(const Broker&) = delete;
  Broker& operator=(const Broker&) = delete;

  void give(std::map<Key, Kept> kept) {
    const std::lock_guard lock(mutex_);
    kept_ = std::move(kept);
  }
  std::map<Key, Kept> kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

  // Wait until a process with this number (0: any) has said hello that was not seen before; returns it.
  wire::Hello hello(std::uint64_t process = 0) {
    std::unique_lock lock(mutex_);
    for (;;) {
      for (auto at = hellos_.begin(); at != hellos_.end(); ++at) {
        if (process != 0 && at->process != process) continue;
        const wire::Hello found = *at;
        hellos_.erase(at);
        return found;
      }
      changed_.wait(lock);
    }
  }

  // Wait until the process's connection has ended.
  void gone(std::uint64_t process) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !connections_.contains(process); });
  }

  template <typename Condition>
  void wait_for(Condition condition) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return condition(kept_); });
  }

  Done quiesce(std::uint64_t process, std::uint64_t timeout_ms) {
    const wire::Quiesce body{timeout_ms};
    return command(process, wire::Type::Quiesce, &body, sizeof body, -1);
  }
  Done evict(std::uint64_t process) { return command(process, wire::Type::Evict, nullptr, 0, -1); }
  Done map(std::uint64_t process) { return command(process, wire::Type::Map, nullptr, 0, -1); }
  Done resume(std::uint64_t process) { return command(process, wire::Type::Resume, nullptr, 0, -1); }
  Done status(std::uint64_t process) { return command(process, wire::Type::Status, nullptr, 0, -1); }
  void welcome(std::uint64_t process, std::uint64_t incarnation) {
    const wire::Welcome body{incarnation};
    transmit(process, wire::Type::Welcome, 0, &body, sizeof body, -1);
  }

  // Send the descriptors of all blocks that this process has.
  void adopt(std::uint64_t process) {
    for (const auto& [key, kept] : this->kept()) {
      if (key.first != process) continue;
      const auto all = this->kept();
      const auto owner = all.find({kept.about.owner, kept.about.owner_id});
      const auto& source = kept.descriptors.empty() && owner != all.end() ? owner->second : kept;
      CHECK(!source.descriptors.empty());
      const wire::Block body{process, key.second};
      CHECK(command(process, wire::Type::Adopt, &body, sizeof body, source.descriptors.front()).status == 0);
    }
  }

 private:
  struct Waiting {
    bool answered = false;
    bool lost = false;
    Done done;
  };

  void transmit(std::uint64_t process, wire::Type type, std::uint64_t request, const void* body, std::size_t size,
                int fd) {
    int socket = -1;
    {
      const std::lock_guard lock(mutex_);
      const auto found = connections_.find(process);
      CHECK(found != connections_.end());
      socket = found->second;
    }
    send_on(socket, type, request, body, size, fd);
  }

  static void send_on(int socket, wire::Type type, std::uint64_t request, const void* body, std::size_t size, int fd) {
    wire::Header header{wire::kMagic, wire::kVersion, type, request, static_cast<std::uint32_t>(size), 0};
    iovec parts[2] = {{&header, sizeof header}, {const_cast<void*>(body), size}};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    CHECK(sendmsg(socket, &message, MSG_NOSIGNAL) >= 0);
  }

  Done command(std::uint64_t process, wire::Type type, const void* body, std::size_t size, int fd) {
    std::uint64_t request = 0;
    {
      const std::lock_guard lock(mutex_);
      request = next_++;
      waiting_[request];
    }
    transmit(process, type, request, body, size, fd);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_[request].answered; });
    Done done = waiting_[request].done;
    waiting_.erase(request);
    return done;
  }

  void accept_all() {
    for (;;) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) return;
      const std::lock_guard lock(mutex_);
      open_[fd] = 0;
      readers_.emplace_back([this, fd] { read_all(fd); });
    }
  }

  void read_all(int socket) {
    std::vector<char> buffer(wire::kPacketMax + sizeof(wire::Header));
    for (;;) {
      iovec part{buffer.data(), buffer.size()};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
      if (got <= 0) break;
      int fd = -1;
      if (const cmsghdr* rights = CMSG_FIRSTHDR(&message)) std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
      wire::Header header{};
      std::memcpy(&header, buffer.data(), sizeof header);
      CHECK(header.magic == wire::kMagic && header.length + sizeof header == static_cast<std::size_t>(got));
      take(socket, header, buffer.data() + sizeof header, fd);
    }
    const std::lock_guard lock(mutex_);
    std::erase_if(connections_, [&](const auto& entry) { return entry.second == socket; });
    open_.erase(socket);
    dead_.push_back(socket);
    changed_.notify_all();
  }

  void take(int socket, const wire::Header& header, const char* body, int fd) {
    std::unique_lock lock(mutex_);
    wire::Block block{};
    if (header.length >= sizeof block) std::memcpy(&block, body, sizeof block);
    switch (header.type) {
      case wire::Type::Hello: {
        wire::Hello hello{};
        std::memcpy(&hello, body, sizeof hello);
        connections_[hello.process] = socket;
        open_[socket] = hello.process;
        hellos_.push_back(hello);
        break;
      }
      case wire::Type::Memory: {
        wire::Memory memory{};
        std::memcpy(&memory, body, sizeof memory);
        Kept& kept = kept_[{open_[socket], memory.id}];
        kept.about = memory;
        if (fd >= 0) kept.descriptors.insert(kept.descriptors.begin(), fd);
        break;
      }
      case wire::Type::Forget: {
        const auto found = kept_.find({block.process, block.id});
        if (found == kept_.end()) break;  // told to the broker before this one
        for (const int one : found->second.descriptors) close(one);
        kept_.erase(found);
        break;
      }
      case wire::Type::Result: {
        Done done;
        wire::Outcome outcome{};
        std::memcpy(&outcome, body, sizeof outcome);
        done = {outcome.status, outcome.count, outcome.bytes,
                std::string(body + sizeof outcome, header.length - sizeof outcome)};
        waiting_[header.request].done = std::move(done);
        waiting_[header.request].answered = true;
        break;
      }
      case wire::Type::Exported: {
        kept_[{block.process, block.id}].descriptors.push_back(fd);
        lock.unlock();
        answer(socket, header.request, {}, nullptr, -1);
        return;
      }
      case wire::Type::Fetch: {
        const auto found = kept_.find({block.process, block.id});
        const bool known = found != kept_.end() && !found->second.descriptors.empty();
        const Kept copy = known ? found->second : Kept{};
        lock.unlock();
        answer(socket, header.request, {block.process, block.id}, known ? &copy : nullptr,
               known ? copy.descriptors.front() : -1);
        return;
      }
      case wire::Type::Identify: {
        Key key{};
        Kept copy;
        bool known = false;
        for (const auto& [one, kept] : kept_) {
          for (const int candidate : kept.descriptors) {
            if (syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, candidate, fd) != 0) continue;
            known = true;
            key = one;
            copy = kept;
          }
        }
        close(fd);
        lock.unlock();
        answer(socket, header.request, key, known ? &copy : nullptr, -1);
        return;
      }
      default: CHECK(false);
    }
    changed_.notify_all();
  }

  static void answer(int socket, std::uint64_t request, Key key, const Kept* kept, int fd) {
    wire::Found found{kept != nullptr ? 0 : 1, 0, key.first, key.second, 0};
    if (kept != nullptr) {
      found.device = kept->about.device;
      found.size = kept->about.size;
    }
    send_on(socket, wire::Type::Answer, request, &found, sizeof found, fd);
  }

  std::string path_;
  int listener_ = -1;
  std::thread acceptor_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::uint64_t> open_;                 // sockets, and whose
  std::map<std::uint64_t, int> connections_;          // by process
  std::vector<std::thread> readers_;
  std::vector<int> dead_;
  std::deque<wire::Hello> hellos_;
  std::map<Key, Kept> kept_;
  std::map<std::uint64_t, Waiting> waiting_;
  std::uint64_t next_ = 1;
};

inline std::string socket_path() {
  static const std::string path = "/tmp/moorage-test-" + std::to_string(getpid()) + ".sock";
  return path;
}

#define DONE(call)                                                                                           \
  do {                                                                                                       \
    const Broker::Done done_ = (call);                                                                       \
    if (done_.status != 0) {                                                                                 \
      std::fprintf(stderr, "%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, done_.status, done_.text.c_str()); \
      std::_Exit(1);                                                                                         \
    }                                                                                                        \
  } while (false)
