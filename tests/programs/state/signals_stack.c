// Signal handlers: on an alternate stack, one for each thread, with flags and mask; a handler that is at work meanwhile.
#include "kit.h"

enum { SIZE = 1 << 16 };
static char *stacks[2];
static __thread char *mine;
static volatile unsigned long handled;

static void caught(int number, siginfo_t *info, void *context) {
  char here;
  (void)context;
  sigset_t held;
  pthread_sigmask(SIG_BLOCK, NULL, &held);
  CHECK(number == SIGUSR1 && info->si_signo == SIGUSR1, "another signal");
  CHECK(&here > mine && &here < mine + SIZE, "the handler is not on its alternate stack");
  CHECK(sigismember(&held, SIGUSR2), "the handler's mask");
  handled++;
}

static void *second(void *unused) {
  (void)unused;
  mine = stacks[1];
  sigaltstack(&(stack_t){.ss_sp = mine, .ss_size = SIZE}, NULL);
  for (;;) {
    pthread_kill(pthread_self(), SIGUSR1);
    nap(20);
  }
  return NULL;
}

static void slow(int number) {
  (void)number;
  uint64_t here[8];
  for (uint64_t i = 0; i < 8; i++) here[i] = value(i);
  for (;;) {  // checkpoints find this thread inside its handler
    nap(10);
    for (uint64_t i = 0; i < 8; i++) CHECK(here[i] == value(i), "the handler's own memory");
  }
}

static void *third(void *unused) {
  (void)unused;
  raise(SIGUSR2);
  return NULL;
}

static void look(int last) {
  (void)last;
  stack_t found;
  unsigned long before = handled;
  pthread_kill(pthread_self(), SIGUSR1);
  CHECK(handled > before, "the handler did not run");
  sigaltstack(NULL, &found);
  CHECK(found.ss_sp == stacks[0] && found.ss_size == SIZE, "the alternate stack is another one");
}

int main(void) {
  draw();
  for (int i = 0; i < 2; i++) stacks[i] = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mine = stacks[0];
  sigaltstack(&(stack_t){.ss_sp = mine, .ss_size = SIZE}, NULL);
  struct sigaction action = {.sa_sigaction = caught, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
  sigaddset(&action.sa_mask, SIGUSR2);
  sigaction(SIGUSR1, &action, NULL);
  signal(SIGUSR2, slow);
  pthread_t one, two;
  pthread_create(&one, NULL, second, NULL);
  pthread_create(&two, NULL, third, NULL);
  run(look);
}
