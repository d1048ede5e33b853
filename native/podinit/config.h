// What pid 1 shall start, as the worker wrote it down (worker/sandbox/podinit.py describes the format).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moorage {

struct RankConfig {
  std::uint32_t rank = 0;
  std::vector<std::string> argv;
  std::vector<std::string> env;  // NAME=VALUE, over the common ones
};

struct Config {
  std::string cwd = "/";
  std::vector<std::string> env;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;
  mode_t umask = 022;
  std::int64_t grace_ms = 10'000;
  std::string events;              // the file that tells of checkpoints and restores
  std::map<std::string, int> hooks;  // kind of event: signal for the ranks
  std::vector<RankConfig> ranks;
};

// Read the file. Returns an empty string, or what is wrong with it.
std::string read_config(const char* path, Config& config);

// The environment of one rank: later assignments of a name replace earlier ones.
std::vector<std::string> rank_environment(const Config& config, const RankConfig& rank);

}  // namespace moorage
