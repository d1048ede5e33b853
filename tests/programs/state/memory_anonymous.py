"""Anonymous private memory: a mapping and the heap, rewritten page by page."""

import mmap
from collections.abc import Iterator

from kit import equal, pattern, run

PAGES = 1024


def program(nonce: bytes) -> Iterator[None]:
    area = mmap.mmap(-1, PAGES * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    heap: dict[int, bytes] = {}
    for page in range(0, PAGES, 3):  # the pages between stay untouched
        heap[page] = pattern(nonce, 64, page)
        area[page * 4096 : page * 4096 + 64] = heap[page]
    step = 0
    yield
    while True:
        step += 1
        for page, expected in heap.items():
            equal(area[page * 4096 : page * 4096 + 64], expected, f"page {page}")
        equal(area[4096:8192], bytes(4096), "an untouched page")
        page = step % (PAGES // 3) * 3
        heap[page] = pattern(nonce, 64, f"{page} {step}")
        area[page * 4096 : page * 4096 + 64] = heap[page]
        yield


run(program)
