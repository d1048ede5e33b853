// POSIX timers: signal to the process and to one thread, on several clocks, one-shot and far, with the value given.
#include "kit.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

enum { TIMERS = 4 };
static timer_t timers[TIMERS], far_timer;
static volatile sig_atomic_t ticks[TIMERS];
static volatile int wrong;
static double began;
static const clockid_t clocks[TIMERS] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME, CLOCK_MONOTONIC};

static void tick(int number, siginfo_t *info, void *context) {
  (void)number;
  (void)context;
  for (int i = 0; i < TIMERS; i++)
    if (info->si_value.sival_ptr == (void *)value((uint64_t)i)) {
      ticks[i]++;
      return;
    }
  wrong = 1;
}

static void look(int last) {
  (void)last;
  sig_atomic_t before[TIMERS];
  struct itimerspec left;
  double limit = now() + 30;
  memcpy(before, (void *)ticks, sizeof before);
  for (int i = 0; i < TIMERS; i++)
    while (ticks[i] == before[i]) {
      CHECK(now() < limit, "timer %d stands still after %d ticks", i, (int)before[i]);
      nap(2);
    }
  CHECK(!wrong, "a timer's signal came with another value");
  timer_gettime(far_timer, &left);
  double expected = 3000 - (now() - began);
  CHECK(left.it_value.tv_sec > expected - 120 && left.it_value.tv_sec < expected + 120, "the far timer: %ld s instead of %f",
        (long)left.it_value.tv_sec, expected);
  CHECK(left.it_interval.tv_sec == 7, "the interval of the far timer");
}

int main(void) {
  draw();
  struct sigaction action = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART};
  sigaction(SIGRTMIN, &action, NULL);
  for (int i = 0; i < TIMERS; i++) {
    struct sigevent event = {.sigev_notify = i == 3 ? SIGEV_THREAD_ID : SIGEV_SIGNAL, .sigev_signo = SIGRTMIN};
    event.sigev_value.sival_ptr = (void *)value((uint64_t)i);
    if (i == 3) event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
    if (timer_create(clocks[i], &event, &timers[i])) fail("timer_create: %s", strerror(errno));
    timer_settime(timers[i], 0, &(struct itimerspec){{0, 10000000}, {0, 10000000}}, NULL);
  }
  timer_create(CLOCK_MONOTONIC, &(struct sigevent){.sigev_notify = SIGEV_NONE}, &far_timer);
  timer_settime(far_timer, 0, &(struct itimerspec){{7, 0}, {3000, 0}}, NULL);
  began = now();
  run(look);
}
