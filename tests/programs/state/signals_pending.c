// Signals that are masked and wait: of the process, of one thread, several queued with their values; what is ignored.
#include "kit.h"

static sigset_t mask;
static pthread_t other;
static volatile int finish;

static int pending(int number) {
  sigset_t set;
  sigpending(&set);
  return sigismember(&set, number);
}

static void *waits(void *unused) {
  (void)unused;
  siginfo_t info;
  pthread_kill(pthread_self(), SIGUSR2);
  while (!finish) {
    CHECK(pending(SIGUSR2) && pending(SIGUSR1), "a signal of the thread or the process is gone");
    nap(20);
  }
  CHECK(sigwaitinfo(&(sigset_t){{1ul << (SIGUSR2 - 1)}}, &info) == SIGUSR2, "the thread's signal");
  return NULL;
}

static void look(int last) {
  sigset_t held;
  struct sigaction action;
  pthread_sigmask(SIG_BLOCK, NULL, &held);
  for (int number = 1; number < SIGRTMAX; number++)
    CHECK(sigismember(&held, number) == sigismember(&mask, number), "signal %d in the mask", number);
  CHECK(pending(SIGUSR1) && pending(SIGRTMIN + 1) && !pending(SIGUSR2), "what waits");
  sigaction(SIGHUP, NULL, &action);
  CHECK(action.sa_handler == SIG_IGN, "SIGHUP is no longer ignored");
  if (!last) return;
  for (uint64_t i = 0; i < 5; i++) {
    siginfo_t info;
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGRTMIN + 1);
    CHECK(sigtimedwait(&one, &info, &(struct timespec){5, 0}) == SIGRTMIN + 1, "queued signal %lu", (unsigned long)i);
    CHECK(info.si_value.sival_ptr == (void *)value(i), "the value of queued signal %lu", (unsigned long)i);
    CHECK(info.si_pid == getpid() && info.si_code == SI_QUEUE, "who sent it: %d %d", info.si_pid, info.si_code);
  }
  CHECK(!pending(SIGRTMIN + 1), "more signals than were queued");
  finish = 1;
  pthread_join(other, NULL);
}

int main(void) {
  draw();
  sigemptyset(&mask);
  sigaddset(&mask, SIGUSR1);
  sigaddset(&mask, SIGUSR2);
  sigaddset(&mask, SIGRTMIN + 1);
  sigprocmask(SIG_SETMASK, &mask, NULL);
  signal(SIGHUP, SIG_IGN);
  kill(getpid(), SIGUSR1);
  for (uint64_t i = 0; i < 5; i++) sigqueue(getpid(), SIGRTMIN + 1, (union sigval){.sival_ptr = (void *)value(i)});
  pthread_create(&other, NULL, waits, NULL);
  run(look);
}
