#include "frames.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

namespace moorage {
namespace {

constexpr std::uint32_t kMagic = 0x31474F4D;  // "MOG1"

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1U) ? (value >> 1U) ^ 0xEDB88320U : value >> 1U;
    table[i] = value;
  }
  return table;
}

std::uint32_t crc32(const char* data, std::size_t size) {
  static constexpr auto kTable = crc_table();
  std::uint32_t value = 0xFFFFFFFFU;
  for (std::size_t i = 0; i < size; ++i) {
    value = (value >> 8U) ^ kTable[(value ^ static_cast<unsigned char>(data[i])) & 0xFFU];
  }
  return ~value;
}

template <typename Number>
void put(char* at, Number value) {
  for (std::size_t i = 0; i < sizeof(Number); ++i) {
    at[i] = static_cast<char>((static_cast<std::uint64_t>(value) >> (8 * i)) & 0xFFU);
  }
}

std::uint64_t realtime_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

void FrameWriter::submit(Kind kind, std::uint32_t rank, std::size_t length) {
  char* header = buffer_.data();
  put(header, kMagic);
  put(header + 8, static_cast<std::uint8_t>(kind));
  put(header + 9, std::uint8_t{0});
  put(header + 10, static_cast<std::uint16_t>(length));
  put(header + 12, rank);
  put(header + 16, ++sequence_);
  put(header + 24, realtime_ns());
  put(header + 4, crc32(header + 8, kHeaderSize - 8 + length));
  size_ = kHeaderSize + length;
  flush();
}

void FrameWriter::submit_number(Kind kind, std::uint32_t rank, std::int32_t number) {
  put(payload().data(), static_cast<std::uint32_t>(number));
  submit(kind, rank, sizeof number);
}

void FrameWriter::submit_text(Kind kind, std::uint32_t rank, std::string_view text) {
  const std::size_t length = std::min(text.size(), kPayloadMax);
  std::memcpy(payload().data(), text.data(), length);
  submit(kind, rank, length);
}

bool FrameWriter::flush() {
  while (size_ != 0) {
    pollfd room{fd_, POLLOUT, 0};
    const int ready = poll(&room, 1, 0);
    if (ready < 0 && errno == EINTR) continue;
    // A writer whose reader has died keeps what is in the pipe; whoever opens the other end again reads on from there.
    reader_gone_ = (room.revents & (POLLERR | POLLNVAL)) != 0;
    if (reader_gone_ || (room.revents & POLLOUT) == 0) return false;
    const ssize_t written = write(fd_, buffer_.data(), size_);
    if (written == static_cast<ssize_t>(size_)) {
      size_ = 0;
    } else if (written < 0 && errno == EPIPE) {
      reader_gone_ = true;
      return false;
    } else if (written < 0 && errno != EINTR) {
      return false;
    }
  }
  return true;
}

void FrameWriter::wait_until_taken() {
  int waiting = 0;
  for (int pause_ms = 1; ioctl(fd_, FIONREAD, &waiting) == 0 && waiting > 0; pause_ms = std::min(pause_ms * 2, 50)) {
    poll(nullptr, 0, pause_ms);
  }
}

}  // namespace moorage
