// Locked memory, and what a mapping was told: not for children, wiped in children, not in core files, huge pages.
#include "kit.h"

enum { SIZE = 1 << 20, KINDS = 4 };
static char *areas[KINDS];
static const int advice[KINDS] = {MADV_DONTFORK, MADV_WIPEONFORK, MADV_DONTDUMP, MADV_HUGEPAGE};
static const char *const flag[KINDS] = {" dc", " wf", " dd", " hg"};
static char *locked;

static int has_flag(const char *area, const char *wanted) {
  FILE *file = fopen("/proc/self/smaps", "r");
  char line[600];
  unsigned long start, end;
  int inside = 0, found = 0;
  while (file && fgets(line, sizeof line, file)) {
    if (sscanf(line, "%lx-%lx ", &start, &end) == 2) inside = (unsigned long)area >= start && (unsigned long)area < end;
    else if (inside && !strncmp(line, "VmFlags:", 8)) found = strstr(line, wanted) != NULL;
  }
  if (file) fclose(file);
  return found;
}

static void look(int last) {
  (void)last;
  for (int i = 0; i < KINDS; i++) {
    CHECK(*(uint64_t *)areas[i] == value((uint64_t)i), "the content of mapping %d", i);
    // Twice: a checkpoint in the midst of reading the list leaves a line that is put together from two.
    CHECK(i == 3 || has_flag(areas[i], flag[i]) || has_flag(areas[i], flag[i]), "mapping %d has lost what it was told (%s)", i, flag[i]);
  }
  CHECK(has_flag(locked, " lo") || has_flag(locked, " lo"), "locked memory is no longer locked");
  pid_t child = fork();
  if (child == 0) _exit(*(uint64_t *)areas[1] == 0 ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0, "memory was not wiped in a child: %d", status);
}

int main(void) {
  draw();
  for (int i = 0; i < KINDS; i++) {
    // A page without access between them, or the kernel would join them.
    areas[i] = (char *)mmap(NULL, SIZE + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + 4096;
    mprotect(areas[i], SIZE, PROT_READ | PROT_WRITE);
    *(uint64_t *)areas[i] = value((uint64_t)i);
    madvise(areas[i], SIZE, advice[i]);
  }
  locked = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mlock(locked, 65536)) fail("mlock: %s", strerror(errno));
  run(look);
}
