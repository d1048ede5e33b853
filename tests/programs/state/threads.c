// Threads: thread-local memory, mutexes (robust, recursive, shared with a process), conditions, barriers, names.
#include "kit.h"

enum { THREADS = 4 };
static __thread uint64_t own[64];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static pthread_barrier_t barrier;
static pthread_key_t key;
static unsigned long turn;
static struct shared { pthread_mutex_t robust; pthread_mutex_t heir; unsigned long count; } *shared;
static pthread_t threads[THREADS];

static void *work(void *number_) {
  unsigned long number = (unsigned long)number_;
  char name[16], found[16];
  snprintf(name, sizeof name, "worker-%lu", number);
  pthread_setname_np(pthread_self(), name);
  for (int i = 0; i < 64; i++) own[i] = value(number * 100 + (unsigned)i);
  pthread_setspecific(key, (void *)value(number));
  pid_t id = (pid_t)syscall(SYS_gettid);
  pthread_barrier_wait(&barrier);
  for (unsigned long round = 0;; round++) {
    pthread_mutex_lock(&mutex);
    while (turn % (THREADS + 1) != number + 1) pthread_cond_wait(&turned, &mutex);
    turn++;
    pthread_cond_broadcast(&turned);
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < 64; i++) CHECK(own[i] == value(number * 100 + (unsigned)i), "thread-local memory of %lu", number);
    CHECK(pthread_getspecific(key) == (void *)value(number), "the thread's key");
    CHECK((pid_t)syscall(SYS_gettid) == id, "the thread's id");
    pthread_getname_np(pthread_self(), found, sizeof found);
    CHECK(!strcmp(name, found), "the thread's name");
  }
  return NULL;
}

static void look(int last) {
  unsigned long before;
  struct timespec limit;
  pthread_mutex_lock(&mutex);
  before = turn++;
  pthread_cond_broadcast(&turned);
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 30;
  while (turn != before + THREADS + 1)
    CHECK(!pthread_cond_timedwait(&turned, &mutex, &limit), "a thread stands still: %lu %lu", turn, before);
  pthread_mutex_unlock(&mutex);
  CHECK(!pthread_mutex_lock(&shared->robust), "the mutex shared with a process");
  shared->count++;
  pthread_mutex_unlock(&shared->robust);
  if (last) {
    int code = pthread_mutex_lock(&shared->heir);
    CHECK(code == EOWNERDEAD, "a robust mutex does not tell that its owner died: %d", code);
  }
}

int main(void) {
  draw();
  pthread_barrier_init(&barrier, NULL, THREADS + 1);
  pthread_key_create(&key, NULL);
  shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&shared->robust, &attributes);
  pthread_mutex_init(&shared->heir, &attributes);
  pid_t other = fork();
  if (!other) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_mutex_lock(&shared->heir);  // ends at the last look with the mutex in its hand
    while (!stopping()) {
      pthread_mutex_lock(&shared->robust);
      shared->count++;
      pthread_mutex_unlock(&shared->robust);
      nap(3);
    }
    _exit(0);
  }
  while (!*(volatile int *)&shared->heir) nap(1);
  for (unsigned long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  pthread_barrier_wait(&barrier);
  run(look);
}
