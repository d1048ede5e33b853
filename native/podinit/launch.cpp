#include "launch.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace moorage {
namespace {

[[noreturn]] void give_up(int code, const std::string& what, int error = 0) {
  const std::string line = "moorage: " + what + (error ? std::string(": ") + std::strerror(error) : "") + "\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  _exit(code);
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  out.reserve(strings.size() + 1);
  for (std::string& text : strings) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

// What init itself may do is nothing that a process of another user could ever get back.
void drop_bounding_set() {
  for (unsigned long capability = 0; prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0; ++capability) {
  }
}

void become_owner(const Config& config) {
  if (config.uid != 0) drop_bounding_set();
  if (setgroups(config.groups.size(), config.groups.data()) != 0) give_up(126, "setgroups", errno);
  if (setresgid(config.gid, config.gid, config.gid) != 0) give_up(126, "setresgid", errno);
  if (setresuid(config.uid, config.uid, config.uid) != 0) give_up(126, "setresuid", errno);
}

// Whether a folder of PATH has a file of this name. execvp says EACCES as well when it may not look into one of them.
bool in_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  for (std::string rest = path ? path : ""; !rest.empty();) {
    const std::size_t colon = rest.find(':');
    if (access((rest.substr(0, colon) + "/" + name).c_str(), F_OK) == 0) return true;
    rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
  }
  return false;
}

[[noreturn]] void become(char** argv) {
  execvp(argv[0], argv);
  const int error = errno;
  const std::string name = argv[0];
  if (error == ENOENT && access(argv[0], F_OK) == 0 && name.find('/') != std::string::npos) {
    give_up(127, name + ": the interpreter that its first line names is missing");
  }
  const bool hidden = error == EACCES && name.find('/') == std::string::npos && !in_path(name);
  if (error == ENOENT || error == ENOTDIR || hidden) give_up(127, name + ": command not found");
  give_up(126, name + ": cannot be executed", error);
}

[[noreturn]] void run(const Config& config, const RankConfig& rank, int out, int err) {
  setsid();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  umask(config.umask);
  become_owner(config);
  // Opened here and not inherited: a descriptor from outside the pod could not be saved.
  const int null = open("/dev/null", O_RDONLY);
  if (null != STDIN_FILENO) {
    if (null >= 0) {
      dup2(null, STDIN_FILENO);
      close(null);
    } else {
      close(STDIN_FILENO);
    }
  }
  if (chdir(config.cwd.c_str()) != 0) give_up(126, "working directory " + config.cwd, errno);
  std::vector<std::string> environment = rank_environment(config, rank);
  std::vector<std::string> arguments = rank.argv;
  std::vector<char*> envp = pointers(environment);
  std::vector<char*> argv = pointers(arguments);
  environ = envp.data();
  become(argv.data());
}

bool make_pipe(int (&ends)[2], const Config& config) {
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  // A program that opens /dev/stdout opens the pipe anew and needs the right to. Without it writing works all the same.
  [[maybe_unused]] const int ignored = fchown(ends[1], config.uid, config.gid);
  return true;
}

}  // namespace

Launched launch(const Config& config, const RankConfig& rank) {
  int out[2] = {-1, -1};
  int err[2] = {-1, -1};
  Launched launched;
  if (make_pipe(out, config) && make_pipe(err, config)) {
    launched.pid = fork();
    if (launched.pid == 0) run(config, rank, out[1], err[1]);
  }
  const int error = errno;
  for (const int end : {out[1], err[1]}) {
    if (end >= 0) close(end);
  }
  if (launched.pid < 0) {
    for (const int end : {out[0], err[0]}) {
      if (end >= 0) close(end);
    }
    errno = error;
    return launched;
  }
  launched.out = out[0];
  launched.err = err[0];
  return launched;
}

void enter(const char* folder, char** argv) {
  if (chdir(folder) != 0) give_up(126, std::string("working directory ") + folder, errno);
  become(argv);
}

}  // namespace moorage
