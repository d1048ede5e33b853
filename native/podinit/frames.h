// Frames on pid 1's stdout (worker/journal_frames.py describes them). One write per frame, never longer than PIPE_BUF,
// so that the kernel takes each one whole: no frame is torn, whoever reads and whenever the reader dies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace moorage {

constexpr std::size_t kFrameMax = 4096;  // PIPE_BUF
constexpr std::size_t kHeaderSize = 32;
constexpr std::size_t kPayloadMax = kFrameMax - kHeaderSize;

enum class Kind : std::uint8_t { Stdout = 1, Stderr = 2, Started = 3, Exited = 4, Ended = 5 };

// Holds at most one frame until the pipe has taken it. Nothing is read from the ranks meanwhile, so a slow or absent
// reader makes the ranks wait, as a full pipe would, and no output is ever dropped.
class FrameWriter {
 public:
  explicit FrameWriter(int fd) : fd_(fd) {}

  // Where the payload of the next frame goes; only while `idle`.
  std::span<char> payload() { return {buffer_.data() + kHeaderSize, kPayloadMax}; }

  // Make a frame of the first `length` bytes of `payload`, and try to write it.
  void submit(Kind kind, std::uint32_t rank, std::size_t length);
  void submit_number(Kind kind, std::uint32_t rank, std::int32_t number);
  void submit_text(Kind kind, std::uint32_t rank, std::string_view text);

  // Write the frame that waits, if there is one and the pipe has room. Returns `idle`.
  bool flush();

  // Return when the reader has taken everything: it writes down what it reads before it takes it off the pipe, so
  // nothing can be lost any more. What is left in a pipe dies with its last end, and a dead reader is replaced.
  void wait_until_taken();

  int fd() const { return fd_; }
  bool idle() const { return size_ == 0; }
  // Whether the last attempt found that nobody holds the other end.
  bool reader_gone() const { return reader_gone_; }

 private:
  int fd_;
  std::uint64_t sequence_ = 0;
  std::size_t size_ = 0;
  bool reader_gone_ = false;
  std::array<char, kFrameMax> buffer_{};
};

}  // namespace moorage
