#include "channel.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moorage::channel {
namespace {

constexpr timeval kSendTime{5, 0};

}  // namespace

Identity identity(const char* path) {
  struct stat about {};
  if (stat(path, &about) != 0) return {};
  return {about.st_dev, about.st_ino, about.st_ctim.tv_sec * 1'000'000'000 + about.st_ctim.tv_nsec};
}

int connect(const char* path, int type) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (std::strlen(path) >= sizeof address.sun_path) return -1;
  std::strcpy(address.sun_path, path);
  const int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kSendTime, sizeof kSendTime);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

bool send(int socket, wire::Type type, std::uint64_t request, const void* body, std::size_t size,
          const std::string& text, int descriptor) {
  const std::size_t clipped = std::min(text.size(), wire::kPacketMax - size);
  wire::Header header{wire::kMagic, wire::kVersion, type, request, static_cast<std::uint32_t>(size + clipped), 0};
  iovec parts[3] = {{&header, sizeof header},
                    {const_cast<void*>(body), size},
                    {const_cast<char*>(text.data()), clipped}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 3;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  }
  for (;;) {
    if (sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) return true;
    if (errno != EINTR) return false;
  }
}

bool receive(int socket, Packet& packet) {
  iovec parts[2] = {{&packet.header, sizeof packet.header}, {packet.body, sizeof packet.body}};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr && got >= 0; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      if (packet.descriptor >= 0) close(packet.descriptor);
      packet.descriptor = fd;
    }
  }
  const bool whole = got >= static_cast<ssize_t>(sizeof packet.header) && (message.msg_flags & MSG_TRUNC) == 0 &&
                     packet.header.magic == wire::kMagic && packet.header.version == wire::kVersion &&
                     packet.header.length == static_cast<std::size_t>(got) - sizeof packet.header;
  if (!whole && packet.descriptor >= 0) {
    close(packet.descriptor);
    packet.descriptor = -1;
  }
  return whole;
}

}  // namespace moorage::channel
