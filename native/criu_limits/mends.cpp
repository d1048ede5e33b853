// Preloaded into CRIU for a restore: what CRIU 4.2 brings back otherwise than it was comes back right.
//
// * An eventfd with EFD_SEMAPHORE is made without that flag, and a counter of more than 32 bits is cut.
// * A process that ended with a code above 127, and was not waited for, comes back with seven bits of the code.
//
// The variable MOORAGE_CRIU_MENDS lists them, each with a ';' at its end: "e MARK COUNT FLAGS;" is an eventfd whose
// counter in the image is MARK (no other's is), "z PID CODE;" a process by its id in the pod.
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"

namespace {

unsigned long long number(const char*& at) {
  while (*at == ' ') ++at;
  unsigned long long value = 0;
  for (; *at >= '0' && *at <= '9'; ++at) value = value * 10 + static_cast<unsigned long long>(*at - '0');
  return value;
}

// The numbers behind the key of the entry `kind` whose first number is `key`; null if there is none.
const char* find(char kind, unsigned long long key) {
  const char* at = getenv("MOORAGE_CRIU_MENDS");
  while (at && *at) {
    const char found = *at++;
    if (number(at) == key && found == kind) return at;
    while (*at && *at != ';') ++at;
    if (*at) ++at;
  }
  return nullptr;
}

// What the entry of this process says, from when CRIU has named it.
const char* shall_end = nullptr;

long answer(long result) {
  if (result >= 0 || result < -4095) return result;
  errno = static_cast<int>(-result);
  return -1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int eventfd(unsigned int count, int flags) noexcept {
  const char* entry = find('e', count);
  if (!entry) return static_cast<int>(answer(kernel(SYS_eventfd2, count, flags, 0, 0, 0, 0)));
  const unsigned long long value = number(entry);
  const long wanted = static_cast<long>(number(entry));
  const long made = kernel(SYS_eventfd2, 0, flags | wanted, 0, 0, 0, 0);
  if (made >= 0 && value > 0) kernel(SYS_write, made, reinterpret_cast<long>(&value), sizeof value, 0, 0, 0);
  return static_cast<int>(answer(made));
}

// CRIU names a process that shall be dead, waits until all are that far, unblocks its signals, and lets it end.
extern "C" __attribute__((visibility("default"))) int prctl(int option, ...) noexcept {
  va_list list;
  va_start(list, option);
  long arguments[4];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const auto [a, b, c, d] = arguments;
  const long result = kernel(SYS_prctl, option, a, b, c, d, 0);
  if (option == PR_SET_NAME) shall_end = find('z', static_cast<unsigned long long>(kernel(SYS_getpid, 0, 0, 0, 0, 0, 0)));
  return static_cast<int>(answer(result));
}

extern "C" __attribute__((visibility("default"))) int sigprocmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  if (how == SIG_UNBLOCK && shall_end) kernel(SYS_exit_group, static_cast<long>(number(shall_end)), 0, 0, 0, 0, 0);
  constexpr long size = 8;  // of the kernel's set
  return static_cast<int>(
      answer(kernel(SYS_rt_sigprocmask, how, reinterpret_cast<long>(set), reinterpret_cast<long>(old), size, 0, 0)));
}
