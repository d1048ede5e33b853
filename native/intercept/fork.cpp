#include "fork.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "captures.h"
#include "control.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "real.h"

#ifndef MOORAGE_DEVICE_PREFIX
#define MOORAGE_DEVICE_PREFIX "/dev/nvidia"
#endif

namespace moorage::forked {
namespace {

constexpr char kPrefix[] = MOORAGE_DEVICE_PREFIX;

struct HostRange {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::size_t> size{0};
};
constexpr std::size_t kHostRanges = 4096;
HostRange host_ranges[kHostRanges];

bool is_host_memory(std::uintptr_t begin, std::uintptr_t end) {
  for (const HostRange& range : host_ranges) {
    const std::uintptr_t at = range.begin.load(std::memory_order_relaxed);
    if (at != 0 && at < end && at + range.size.load(std::memory_order_relaxed) > begin) return true;
  }
  return false;
}

struct Entry64 {
  std::uint64_t inode;
  std::int64_t offset;
  unsigned short length;
  unsigned char type;
  char name[1];
};

int number(const char* text) {
  int value = 0;
  if (*text == '\0') return -1;
  for (; *text != '\0'; ++text) {
    if (*text < '0' || *text > '9' || value > 100'000'000) return -1;
    value = value * 10 + (*text - '0');
  }
  return value;
}

void close_descriptors() {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  alignas(8) char buffer[4096];
  for (;;) {
    const long got = syscall(SYS_getdents64, folder, buffer, sizeof buffer);
    if (got <= 0) break;
    for (long at = 0; at < got;) {
      const auto* entry = reinterpret_cast<const Entry64*>(buffer + at);
      at += entry->length;
      char target[sizeof kPrefix] = "";
      const int fd = number(entry->name);
      if (fd < 0 || fd == folder) continue;
      if (readlinkat(folder, entry->name, target, sizeof target - 1) < 0) continue;
      if (std::strncmp(target, kPrefix, sizeof kPrefix - 1) == 0) close(fd);
    }
  }
  close(folder);
}

std::uintptr_t hexadecimal(const char*& at) {
  std::uintptr_t value = 0;
  for (;; ++at) {
    if (*at >= '0' && *at <= '9') {
      value = value * 16 + static_cast<std::uintptr_t>(*at - '0');
    } else if (*at >= 'a' && *at <= 'f') {
      value = value * 16 + static_cast<std::uintptr_t>(*at - 'a' + 10);
    } else {
      return value;
    }
  }
}

// One line of /proc/self/maps: begin-end rwxp offset device inode path.
void drop_map(const char* line) {
  const char* path = std::strchr(line, '/');
  if (path == nullptr || std::strncmp(path, kPrefix, sizeof kPrefix - 1) != 0) return;
  const std::uintptr_t begin = hexadecimal(line);
  ++line;
  const std::uintptr_t end = hexadecimal(line);
  ++line;
  int protection = PROT_NONE;
  if (!is_host_memory(begin, end)) {
    if (line[0] == 'r') protection |= PROT_READ;
    if (line[1] == 'w') protection |= PROT_WRITE;
  }
  // Not simply unmapped: the driver's own code that runs as this process ends may still look there.
  mmap(reinterpret_cast<void*>(begin), end - begin, protection,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

// The file changes under the reader, but the kernel goes on behind the last address that it told: what is replaced here
// keeps its place and size, so nothing is missed.
void drop_maps() {
  const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return;
  char buffer[8192];
  std::size_t filled = 0;
  for (;;) {
    const ssize_t got = read(maps, buffer + filled, sizeof buffer - 1 - filled);
    if (got <= 0) break;
    filled += static_cast<std::size_t>(got);
    buffer[filled] = '\0';
    char* line = buffer;
    while (char* end = std::strchr(line, '\n')) {
      *end = '\0';
      drop_map(line);
      line = end + 1;
    }
    filled = static_cast<std::size_t>(buffer + filled - line);
    if (filled == sizeof buffer - 1) filled = 0;  // no path is that long
    std::memmove(buffer, line, filled);
  }
  close(maps);
}

void before_fork() { control::before_fork(); }
void after_in_parent() { control::after_fork_in_parent(); }

void after_in_child() {
  const bool used = driver::initialised();
  gate::after_fork_in_child(used || gate::now() == Level::Forked);
  captures::after_fork_in_child();
  control::after_fork_in_child();
  if (used) drop_driver();
}

}  // namespace

void start() { pthread_atfork(before_fork, after_in_parent, after_in_child); }

void drop_driver() {
  close_descriptors();
  drop_maps();
}

void host_memory_added(const void* begin, std::size_t size) {
  for (HostRange& range : host_ranges) {
    std::uintptr_t none = 0;
    if (range.begin.load(std::memory_order_relaxed) != 0) continue;
    range.size.store(size, std::memory_order_relaxed);
    if (range.begin.compare_exchange_strong(none, reinterpret_cast<std::uintptr_t>(begin))) return;
  }
}

void host_memory_removed(const void* begin) {
  for (HostRange& range : host_ranges) {
    auto here = reinterpret_cast<std::uintptr_t>(begin);
    if (range.begin.compare_exchange_strong(here, 0)) return;
  }
}

}  // namespace moorage::forked

namespace moorage::hook {

CUresult cuMemHostAlloc(void** pointer, size_t size, unsigned int flags) {
  const CUresult result = real::cuMemHostAlloc(pointer, size, flags);
  if (result == CUDA_SUCCESS) forked::host_memory_added(*pointer, size);
  return result;
}

CUresult cuMemAllocHost_v2(void** pointer, size_t size) {
  const CUresult result = real::cuMemAllocHost_v2(pointer, size);
  if (result == CUDA_SUCCESS) forked::host_memory_added(*pointer, size);
  return result;
}

CUresult cuMemFreeHost(void* pointer) {
  forked::host_memory_removed(pointer);
  return real::cuMemFreeHost(pointer);
}

}  // namespace moorage::hook
