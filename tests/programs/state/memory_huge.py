"""Huge pages: private and shared mappings of hugetlb memory, a hugetlb memfd, and transparent huge pages."""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kit import Lacks, equal, pattern, run

HUGE = 2 << 20
MAP_HUGETLB = 0x40000
MFD_HUGETLB = 4


def program(nonce: bytes) -> Iterator[None]:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not free.exists() or int(free.read_text()) < 4:
        raise Lacks("no huge pages are free here (vm.nr_hugepages)")
    private = mmap.mmap(-1, HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    shared = mmap.mmap(-1, HUGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    fd = os.memfd_create("huge", MFD_HUGETLB)
    os.ftruncate(fd, HUGE)
    named = mmap.mmap(fd, HUGE)
    plain = mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain.madvise(mmap.MADV_HUGEPAGE)
    areas = {"private": private, "shared": shared, "memfd": named, "transparent": plain}
    for name, area in areas.items():
        area[12345 : 12345 + 4096] = pattern(nonce, 4096, name)
    yield
    while True:
        for name, area in areas.items():
            equal(area[12345 : 12345 + 4096], pattern(nonce, 4096, name), f"the {name} mapping")
        # One that is read in pieces while the reader's own memory grows may show a mapping twice.
        text = Path("/proc/self/smaps").read_text()
        found = re.findall(r"^([0-9a-f]+)-.*\n(?:[A-Z].*\n)*?KernelPageSize: +2048 kB", text, re.MULTILINE)
        equal(len(set(found)), 3, f"mappings of huge pages: {found}")
        yield


run(program)
