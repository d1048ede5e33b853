// What the C programs of this folder share; the words are those of kit.py.
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static uint64_t nonce;

static void leave(int code, const char *word, const char *format, va_list arguments) {
  char text[400], line[500];
  vsnprintf(text, sizeof text, format, arguments);
  int length = snprintf(line, sizeof line, "%s %s\n", word, text);
  if (write(1, line, (size_t)length) != length) code = 71;
  _exit(code);
}

__attribute__((unused)) static void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  leave(70, "FATAL", format, arguments);
}

__attribute__((unused)) static void lacks(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  leave(0, "lacks", format, arguments);
}

#define CHECK(condition, ...) do { if (!(condition)) fail(__VA_ARGS__); } while (0)

__attribute__((unused)) static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void nap(long milliseconds) {
  struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  while (nanosleep(&rest, &rest)) {
  }
}

// A value that only who knows the nonce can foretell.
__attribute__((unused)) static uint64_t value(uint64_t label) {
  uint64_t x = nonce ^ (label * 0x9E3779B97F4A7C15u);
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 29);
}

static void draw(void) {
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) fail("getrandom");
}

static int stopping(void) {
  const char *stop = getenv("STATE_STOP");
  return access(stop ? stop : "stop", F_OK) == 0;
}

// Sets up, looks until told to stop, takes the last look.
static void run(void (*look)(int last)) {
  unsigned long steps = 0;
  printf("ready %016lx\n", (unsigned long)nonce);
  fflush(stdout);
  for (; !stopping(); steps++) {
    look(0);
    nap(20);
  }
  look(1);
  printf("pass %016lx %lu\n", (unsigned long)nonce, steps);
  fflush(stdout);
  _exit(0);
}
