#include "config.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

namespace moorage {
namespace {

constexpr std::string_view kVersion = "moorage-init 1";

std::string read_file(const char* path, std::string& content) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::string(path) + ": " + std::strerror(errno);
  char block[65536];
  for (;;) {
    const ssize_t got = read(fd, block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int code = errno;
      close(fd);
      return std::string(path) + ": " + std::strerror(code);
    }
    if (got == 0) break;
    content.append(block, static_cast<std::size_t>(got));
  }
  close(fd);
  return {};
}

template <typename Number>
bool parse(std::string_view text, Number& out, int base = 10) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, out, base);
  return result.ec == std::errc{} && result.ptr == end;
}

bool parse_groups(std::string_view text, std::vector<gid_t>& out) {
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    gid_t group = 0;
    if (!parse(text.substr(0, comma), group)) return false;
    out.push_back(group);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
  }
  return true;
}

// KIND NUMBER
bool parse_hook(std::string_view text, std::map<std::string, int>& out) {
  const std::size_t space = text.find(' ');
  int number = 0;
  if (space == std::string_view::npos || !parse(text.substr(space + 1), number)) return false;
  out[std::string(text.substr(0, space))] = number;
  return number > 0 && number <= 64;
}

bool apply(Config& config, std::string_view name, std::string_view value) {
  RankConfig* rank = config.ranks.empty() ? nullptr : &config.ranks.back();
  if (name == "env") {
    (rank ? rank->env : config.env).emplace_back(value);
    return value.find('=') != std::string_view::npos;
  }
  if (name == "argv") {
    if (!rank) return false;
    rank->argv.emplace_back(value);
    return true;
  }
  if (name == "rank") {
    config.ranks.emplace_back();
    return parse(value, config.ranks.back().rank);
  }
  if (name == "cwd") {
    config.cwd = value;
    return true;
  }
  if (name == "events") {
    config.events = value;
    return true;
  }
  if (name == "hook") return parse_hook(value, config.hooks);
  if (name == "umask") return parse(value, config.umask, 8);
  if (name == "uid") return parse(value, config.uid);
  if (name == "gid") return parse(value, config.gid);
  if (name == "groups") return parse_groups(value, config.groups);
  if (name == "grace_ms") return parse(value, config.grace_ms);
  return false;
}

}  // namespace

std::string read_config(const char* path, Config& config) {
  std::string content;
  if (std::string wrong = read_file(path, content); !wrong.empty()) return wrong;
  std::string_view rest = content;
  bool first = true;
  bool ended = false;
  while (!rest.empty() && !ended) {
    const std::size_t stop = rest.find('\0');
    if (stop == std::string_view::npos) break;
    const std::string_view field = rest.substr(0, stop);
    rest.remove_prefix(stop + 1);
    if (first) {
      if (field != kVersion) return std::string(path) + ": not a configuration of this version";
      first = false;
      continue;
    }
    if (field == "end") {
      ended = true;
      continue;
    }
    const std::size_t space = field.find(' ');
    const std::string_view name = field.substr(0, space);
    const std::string_view value = space == std::string_view::npos ? std::string_view{} : field.substr(space + 1);
    // The value may be a secret: only the field's name goes into the message.
    if (!apply(config, name, value)) return std::string(path) + ": bad field " + std::string(name);
  }
  if (!ended) return std::string(path) + ": cut short";
  if (config.ranks.empty()) return std::string(path) + ": no ranks";
  for (const RankConfig& rank : config.ranks) {
    if (rank.argv.empty()) return std::string(path) + ": rank " + std::to_string(rank.rank) + " has no command";
  }
  return {};
}

std::vector<std::string> rank_environment(const Config& config, const RankConfig& rank) {
  std::vector<std::string> merged;
  const auto set = [&merged](const std::string& assignment) {
    const std::size_t length = assignment.find('=') + 1;
    for (std::string& known : merged) {
      if (known.compare(0, length, assignment, 0, length) == 0) {
        known = assignment;
        return;
      }
    }
    merged.push_back(assignment);
  };
  for (const std::string& assignment : config.env) set(assignment);
  for (const std::string& assignment : rank.env) set(assignment);
  return merged;
}

}  // namespace moorage
