// Packets with descriptors over a unix socket.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "wire.h"

namespace moorage::channel {

struct Packet {
  wire::Header header{};
  char body[wire::kPacketMax];
  int descriptor = -1;  // the receiver's
};

// Which socket lies at a path: bound anew, it is another one.
struct Identity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t changed_ns = 0;
  bool operator==(const Identity&) const = default;
};
Identity identity(const char* path);

// -1: nobody listens there.
int connect(const char* path, int type = SOCK_SEQPACKET);

// A header, a structure, text and at most one descriptor, as one packet. False: the connection is of no more use.
bool send(int socket, wire::Type type, std::uint64_t request, const void* body, std::size_t size,
          const std::string& text, int descriptor);

// False: the other side has gone, or sent what is no packet of ours.
bool receive(int socket, Packet& packet);

}  // namespace moorage::channel
