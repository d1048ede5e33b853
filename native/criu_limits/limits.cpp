// Preloaded into CRIU where root lacks CAP_SYS_RESOURCE (many containers): reads the limits of another user's process.
//
// CRIU reads each process's limits with prlimit(2), which the kernel allows for a process of another user only to a
// caller with that capability, although the same numbers stand readable in /proc/PID/limits. So this takes them from
// there when the call was refused. Setting limits is left alone: a restored process sets its own, and what its
// ancestors could grant once they can grant again.
//
// Only libc symbols of the oldest version: CRIU may run with a C library that is not the one of this host.
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"

extern "C" __attribute__((visibility("default"), used)) const char moorage_criu_library[] = MOORAGE_CRIU_LIBRARY;

namespace {

constexpr size_t kNameWidth = 26;  // fs/proc/base.c: "%-25s " before the soft limit

// The decimal number (or `unlimited`) at `at`, which is moved behind it and the blanks that follow.
rlim64_t number(const char*& at, const char* end) {
  rlim64_t value = 0;
  const bool unlimited = at < end && *at == 'u';
  for (; at < end && *at != ' ' && *at != '\n'; ++at) {
    if (!unlimited) value = value * 10 + static_cast<rlim64_t>(*at - '0');
  }
  while (at < end && *at == ' ') ++at;
  return unlimited ? RLIM64_INFINITY : value;
}

void path_of(pid_t pid, char* out) {
  const char* head = "/proc/";
  while (*head) *out++ = *head++;
  char digits[16];
  int count = 0;
  do digits[count++] = static_cast<char>('0' + pid % 10);
  while ((pid /= 10) > 0);
  while (count > 0) *out++ = digits[--count];
  const char* tail = "/limits";
  while (*tail) *out++ = *tail++;
  *out = '\0';
}

// Line `resource` below the head line holds that limit: the kernel prints them in the order of their numbers.
bool from_proc(pid_t pid, int resource, struct rlimit64* limit) {
  char path[48];
  path_of(pid, path);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  char text[4096];
  size_t size = 0;
  for (ssize_t got; size < sizeof text && (got = read(file, text + size, sizeof text - size)) > 0;)
    size += static_cast<size_t>(got);
  close(file);
  const char* at = text;
  const char* end = text + size;
  for (int line = 0; line <= resource; ++line) {
    while (at < end && *at != '\n') ++at;
    if (at == end) return false;
    ++at;
  }
  if (static_cast<size_t>(end - at) <= kNameWidth) return false;
  at += kNameWidth;
  limit->rlim_cur = number(at, end);
  limit->rlim_max = number(at, end);
  return true;
}

}  // namespace

// CRIU calls prlimit(2) through libc's syscall(), so this stands in its place.
extern "C" __attribute__((visibility("default"))) long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const auto [a, b, c, d, e, f] = arguments;
  long result = kernel(number, a, b, c, d, e, f);
  if (number == SYS_prlimit64 && result == -EPERM && c == 0 && d != 0 &&
      from_proc(static_cast<pid_t>(a), static_cast<int>(b), reinterpret_cast<struct rlimit64*>(d)))
    result = 0;
  if (result >= 0 || result < -4095) return result;
  errno = static_cast<int>(-result);
  return -1;
}
