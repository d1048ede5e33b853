// Memory protection keys: a key that is allocated, its mapping, and the rights of each thread.
#include "kit.h"

static char *area;
static int key;
static sigjmp_buf back;

static void caught(int number) { siglongjmp(back, number); }

static void look(int last) {
  (void)last;
  CHECK(pkey_get(key) == PKEY_DISABLE_WRITE, "the rights of the key: %d", pkey_get(key));
  CHECK(*(uint64_t *)area == value(1), "the content");
  if (!sigsetjmp(back, 1)) {
    *(volatile char *)area = 1;
    fail("a page that its key protects was written");
  }
}

int main(void) {
  draw();
  key = pkey_alloc(0, 0);
  if (key < 0) lacks("this processor or kernel has no memory protection keys (pkey_alloc: %s)", strerror(errno));
  struct sigaction action = {.sa_handler = caught, .sa_flags = SA_NODEFER};
  sigaction(SIGSEGV, &action, NULL);
  area = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *(uint64_t *)area = value(1);
  pkey_mprotect(area, 4096, PROT_READ | PROT_WRITE, key);
  pkey_set(key, PKEY_DISABLE_WRITE);
  run(look);
}
