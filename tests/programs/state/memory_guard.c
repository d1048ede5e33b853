// Guard pages: without access, and those of MADV_GUARD_INSTALL; read-only pages; a stack that grows.
#include "kit.h"

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

enum { PAGE = 4096 };
static char *area, *guarded;
static int light;
static sigjmp_buf back;

static void caught(int number) { siglongjmp(back, number); }

static int faults(volatile char *at, int write_it) {
  if (sigsetjmp(back, 1)) return 1;
  if (write_it) *at = 1; else (void)*at;
  return 0;
}

static unsigned long deep(int level) {
  volatile unsigned long room[512];
  room[0] = (unsigned long)level;
  return level ? deep(level - 1) + room[0] : room[0];
}

static void look(int last) {
  (void)last;
  CHECK(faults(area, 0) && faults(area + 5 * PAGE, 1), "a guard page can be touched");
  CHECK(!faults(area + PAGE, 1) && !faults(area + 4 * PAGE, 1), "a page beside a guard page cannot be touched");
  CHECK(!faults(area + 2 * PAGE, 0) && faults(area + 2 * PAGE, 1), "a read-only page");
  CHECK(*(uint64_t *)(area + 2 * PAGE) == value(1), "the content of a read-only page");
  CHECK(*(uint64_t *)(area + 3 * PAGE) == value(2), "the content between guard pages");
  if (light) {
    CHECK(faults(guarded + PAGE, 0) && faults(guarded + PAGE, 1), "a light guard page can be touched");
    CHECK(!faults(guarded, 1) && !faults(guarded + 2 * PAGE, 1), "a page beside a light guard page");
    CHECK(*(uint64_t *)(guarded + 64) == value(3), "the content beside a light guard page");
  }
  CHECK(deep(200) == 200 * 201 / 2, "the stack");
}

int main(void) {
  draw();
  struct sigaction action = {.sa_handler = caught, .sa_flags = SA_NODEFER};
  sigaction(SIGSEGV, &action, NULL);
  area = mmap(NULL, 6 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  guarded = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *(uint64_t *)(area + 2 * PAGE) = value(1);
  *(uint64_t *)(area + 3 * PAGE) = value(2);
  *(uint64_t *)(guarded + 64) = value(3);
  mprotect(area, PAGE, PROT_NONE);
  mprotect(area + 5 * PAGE, PAGE, PROT_NONE);
  mprotect(area + 2 * PAGE, PAGE, PROT_READ);
  light = madvise(guarded + PAGE, PAGE, MADV_GUARD_INSTALL) == 0;
  run(look);
}
