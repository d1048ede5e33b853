// What the proxies need of their own in a process that is not theirs: a thread that nobody notices, a number of one's own.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/types.h>

#include <cstdint>

namespace moorage {

// A detached thread that takes none of the process's signals. False: there is none.
inline bool start_thread(void* (*run)(void*)) {
  sigset_t every;
  sigset_t before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, run, nullptr);
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error == 0;
}

// Names a process towards the worker; never 0.
inline std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0) {
    if (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) number = 0;
  }
  return number;
}

}  // namespace moorage
