// The worker's end of the conversation with the NCCL proxy, for a test in the same process.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "msgpack.h"
#include "wire.h"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)

using moorage::msgpack::Reader;
using moorage::msgpack::Writer;
namespace wire = moorage::nccl::wire;

struct Lane {
  std::string communicator;
  std::int64_t member, kind, peer, count;
};
struct Held {
  std::uint64_t ticket, thread;
  std::vector<Lane> lanes;
  std::size_t creates;
};
struct Handle {
  std::string communicator;
  std::int64_t member, size, state;
};
struct Report {
  bool stale = false;
  std::uint64_t attempt = 0, round = 0, moves = 0;
  std::vector<std::string> names;
  std::vector<Lane> admitted;
  std::vector<Held> held, inside;
  std::vector<Handle> handles;
  std::vector<std::string> undrained;

  std::int64_t count(std::string_view name, int member, int kind = 0, int peer = -1) const {
    for (const Lane& lane : admitted) {
      if (lane.communicator == name && lane.member == member && lane.kind == kind && lane.peer == peer) return lane.count;
    }
    return 0;
  }
};

class Host {
 public:
  explicit Host(std::string path) : path_(std::move(path)) { bind(); }

  void bind() {
    if (listening_ >= 0) close(listening_);
    unlink(path_.c_str());
    listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    CHECK(::bind(listening_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    CHECK(listen(listening_, 4) == 0);
  }

  // Wait for the process; whether its communicators are gone.
  bool greet() {
    if (connection_ >= 0) close(connection_);
    connection_ = accept(listening_, nullptr, nullptr);
    const std::string body = receive();
    Reader in(body);
    CHECK(in.array() == 14 && in.integer() == wire::kHello && in.number() == wire::kVersion);
    process = in.number();
    for (int skipped = 0; skipped < 3; ++skipped) in.integer();
    in.text();
    CHECK(in.integer() == 22809);
    in.text();
    for (int skipped = 0; skipped < 3; ++skipped) in.integer();
    const bool torn = in.boolean();
    Writer out;
    out.array(4).number(wire::kWelcome).number(1).number(0).array(0);
    send(out);
    return torn;
  }

  // A cut has taken a creation back before this process came to it: this id takes the place of the one that it knows.
  void renew(const std::string& name, const std::string& id) {
    Writer out;
    out.array(4).number(wire::kWelcome).number(1).number(0).array(1).array(2).text(name).bytes(id);
    send(out);
  }

  enum Phase { Open, Cut, Drain };
  Report order(Phase phase, const std::vector<std::uint64_t>& admit = {}, const std::vector<Lane>& needs = {},
               bool push = false) {
    Writer out;
    out.array(8).number(wire::kObey).number(++request_).number(attempt).number(++round).number(phase);
    out.array(admit.size());
    for (const std::uint64_t ticket : admit) out.number(ticket);
    out.array(needs.size());
    for (const Lane& lane : needs) {
      out.array(5).text(lane.communicator).integer(lane.member).integer(lane.kind).integer(lane.peer);
      out.integer(lane.count);
    }
    out.boolean(push);
    send(out);
    return report(receive());
  }

  // Done: an empty text; else what was wrong.
  std::string teardown(const std::vector<std::string>& again = {}, const std::vector<std::string>& widowed = {}) {
    send_teardown(again, widowed, false);
    return outcome();
  }
  void send_teardown(const std::vector<std::string>& again, const std::vector<std::string>& widowed, bool abort) {
    Writer out;
    out.array(7).number(wire::kTeardown).number(++request_).number(attempt).array(again.size());
    for (const std::string& name : again) out.text(name);
    out.array(widowed.size());
    for (const std::string& name : widowed) out.text(name);
    out.number(20).boolean(abort);
    send(out);
  }
  std::vector<std::string> ids(const std::vector<std::string>& names) {
    Writer out;
    out.array(3).number(wire::kMakeIds).number(++request_).array(names.size());
    for (const std::string& name : names) out.text(name);
    send(out);
    const std::string body = receive();
    Reader in(body);
    CHECK(in.array() == 3 && in.integer() == wire::kIds && in.number() == request_);
    std::vector<std::string> made;
    for (std::size_t left = in.array(); left > 0; --left) made.emplace_back(in.text());
    return made;
  }
  std::string rebuild(const std::vector<std::string>& names, const std::vector<std::string>& again = {}) {
    send_rebuild(names, again);
    return outcome();
  }
  void send_rebuild(const std::vector<std::string>& names, const std::vector<std::string>& again = {}) {
    const auto fresh = ids(names);
    const auto anew = ids(again);
    Writer out;
    out.array(6).number(wire::kRebuild).number(++request_).number(attempt).array(names.size());
    for (std::size_t i = 0; i < names.size(); ++i) out.array(2).text(names[i]).bytes(fresh[i]);
    out.array(again.size());
    for (std::size_t i = 0; i < again.size(); ++i) out.array(2).text(again[i]).bytes(anew[i]);
    out.number(20);
    send(out);
  }
  // The cut is accepted.
  std::string keep() {
    Writer out;
    out.array(3).number(wire::kKeep).number(++request_).number(attempt);
    send(out);
    return outcome();
  }
  void part() {
    Writer out;
    out.array(2).number(wire::kPart).number(++request_);
    send(out);
    CHECK(outcome().empty());
    char byte = 0;
    CHECK(recv(connection_, &byte, 1, 0) == 0);
    bind();
  }
  std::vector<std::string> refusals() { return prepare(false); }
  std::vector<std::string> reasons() { return prepare(true); }

  // Of the last command, or of one so many before it.
  std::string outcome(std::uint64_t before = 0) {
    const std::string body = receive();
    Reader in(body);
    in.array();
    const auto tag = in.integer();
    CHECK(in.number() == request_ - before);
    if (tag == wire::kDone) return "";
    CHECK(tag == wire::kFailed && in.integer() != 0);
    return std::string(in.text());
  }

  std::uint64_t process = 0;
  std::uint64_t attempt = 1;
  std::uint64_t round = 0;

 private:
  std::vector<std::string> prepare(bool reasons) {
    Writer out;
    out.array(2).number(wire::kPrepare).number(++request_);
    send(out);
    const std::string body = receive();
    Reader in(body);
    CHECK(in.array() == 3 && in.integer() == wire::kPrepared && in.number() == request_);
    std::vector<std::string> found;
    for (std::size_t left = in.array(); left > 0; --left) {
      CHECK(in.array() == 3);
      const std::string communicator(in.text());
      const std::string api(in.text());
      const std::string why(in.text());
      CHECK(!why.empty());
      found.push_back(reasons ? why : communicator + " " + api);
    }
    return found;
  }
  void send(Writer& message) {
    const std::string body = message.take();
    const wire::Header header{wire::kMagic, static_cast<std::uint32_t>(body.size())};
    CHECK(::send(connection_, &header, sizeof header, MSG_NOSIGNAL) == sizeof header);
    CHECK(::send(connection_, body.data(), body.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(body.size()));
  }
  std::string receive() {
    wire::Header header{};
    CHECK(recv(connection_, &header, sizeof header, MSG_WAITALL) == sizeof header && header.magic == wire::kMagic);
    std::string body(header.length, '\0');
    CHECK(recv(connection_, body.data(), body.size(), MSG_WAITALL) == static_cast<ssize_t>(body.size()));
    return body;
  }
  static Lane lane(Reader& in, const std::vector<std::string>& names) {
    CHECK(in.array() == 5);
    const std::string& name = names.at(in.number());
    const auto member = in.integer();
    const auto kind = in.integer();
    const auto peer = in.integer();
    return {name, member, kind, peer, in.integer()};
  }
  static std::vector<Held> calls(Reader& in, const std::vector<std::string>& names) {
    std::vector<Held> found;
    for (std::size_t left = in.array(); left > 0; --left) {
      CHECK(in.array() == 5);
      Held call{};
      call.ticket = in.number();
      call.thread = in.number();
      in.number();
      for (std::size_t lanes = in.array(); lanes > 0; --lanes) call.lanes.push_back(lane(in, names));
      call.creates = in.array();
      for (std::size_t creates = call.creates; creates > 0; --creates) {
        CHECK(in.array() == 3);
        names.at(in.number());
        in.integer();
        in.integer();
      }
      found.push_back(call);
    }
    return found;
  }
  Report report(const std::string& body) {
    Reader in(body);
    Report found;
    CHECK(in.array() == 14 && in.integer() == wire::kReport && in.number() == request_);
    found.stale = in.boolean();
    found.attempt = in.number();
    found.round = in.number();
    for (std::size_t left = in.array(); left > 0; --left) found.names.emplace_back(in.text());
    for (std::size_t left = in.array(); left > 0; --left) found.admitted.push_back(lane(in, found.names));
    found.held = calls(in, found.names);
    found.inside = calls(in, found.names);
    CHECK(in.number() == 0);
    for (std::size_t left = in.array(); left > 0; --left) {
      CHECK(in.array() == 4);
      const std::string& name = found.names.at(in.number());
      const auto member = in.integer();
      const auto size = in.integer();
      found.handles.push_back({name, member, size, in.integer()});
    }
    for (std::size_t left = in.array(); left > 0; --left) {
      CHECK(in.array() == 2);
      found.names.at(in.number());
      in.number();
    }
    found.moves = in.number();
    for (std::size_t left = in.array(); left > 0; --left) found.undrained.emplace_back(in.text());
    return found;
  }

  std::string path_;
  int listening_ = -1;
  int connection_ = -1;
  std::uint64_t request_ = 0;
};

// The first report of this phase for which that holds.
inline Report until(Host& host, Host::Phase phase, const std::function<bool(const Report&)>& condition) {
  for (int tries = 0; tries < 5000; ++tries) {
    Report report = host.order(phase);
    if (condition(report)) return report;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(!"it came about in time");
  std::abort();
}
