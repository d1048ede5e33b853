#include "hooks.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string_view>
#include <utility>

namespace moorage {
namespace {

std::string read_all(const char* path) {
  std::string content;
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return content;
  char block[16384];
  for (;;) {
    const ssize_t got = read(fd, block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    content.append(block, static_cast<std::size_t>(got));
  }
  close(fd);
  return content;
}

template <typename Number>
bool parse(std::string_view text, Number& out, int base) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, out, base);
  return result.ec == std::errc{} && result.ptr == end;
}

}  // namespace

Hooks::Hooks(std::string path, std::map<std::string, int> signals)
    : path_(std::move(path)), signals_(std::move(signals)) {}

std::vector<int> Hooks::take() {
  std::vector<int> found;
  if (path_.empty()) return found;
  const std::string content = read_all(path_.c_str());
  std::string_view rest = content;
  for (std::size_t stop; (stop = rest.find('\n')) != std::string_view::npos; rest.remove_prefix(stop + 1)) {
    // NUMBER KIND ID {JSON}
    const std::string_view line = rest.substr(0, stop);
    const std::size_t first = line.find(' ');
    if (first == std::string_view::npos) continue;
    std::uint64_t number = 0;
    if (!parse(line.substr(0, first), number, 10) || number <= taken_) continue;
    taken_ = number;
    const std::string_view behind = line.substr(first + 1);
    const auto signal = signals_.find(std::string(behind.substr(0, behind.find(' '))));
    if (signal != signals_.end()) found.push_back(signal->second);
  }
  return found;
}

bool catches(pid_t pid, int number) {
  const std::string status = read_all(("/proc/" + std::to_string(pid) + "/status").c_str());
  constexpr std::string_view kField = "\nSigCgt:\t";
  const std::size_t at = status.find(kField);
  if (at == std::string::npos) return false;
  const std::string_view rest = std::string_view(status).substr(at + kField.size());
  std::uint64_t caught = 0;
  return parse(rest.substr(0, rest.find('\n')), caught, 16) && (caught >> (number - 1) & 1) != 0;
}

}  // namespace moorage
