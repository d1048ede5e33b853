"""Versions of files that share pages in every way: whatever is stored comes back, and little is stored twice."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.store import Content, Store
from moorage.store.chunker import PAGE

PAGES = [bytes(PAGE), *(random.Random(seed).randbytes(PAGE) for seed in range(1, 400))]

# A file is runs of pages: from where in `PAGES`, how many, and whether the same page again and again.
RUNS = st.lists(
    st.tuples(st.integers(0, 399), st.integers(1, 150), st.sampled_from([False, False, True])), min_size=1, max_size=6
)


def file_of(runs: list[tuple[int, int, bool]], tail: int) -> bytes:
    pages = [PAGES[start if same else (start + i) % 400] for start, count, same in runs for i in range(count)]
    return b"".join(pages) + b"x" * tail


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    versions=st.lists(st.tuples(RUNS, st.integers(0, 5000)), min_size=1, max_size=5),
    threads=st.integers(1, 2),
    slow=st.booleans(),
    fresh=st.booleans(),
    edits=st.lists(st.tuples(st.integers(0, 599), st.integers(1, 399)), max_size=8),
)
def test_all_versions_of_a_file_come_back(
    versions: list[tuple[list[tuple[int, int, bool]], int]],
    threads: int,
    slow: bool,
    fresh: bool,
    edits: list[tuple[int, int]],
) -> None:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        store = Store.open(f"{folder}/store", create=True)
        if slow:
            store.write_rate.value = 1e6  # so that everything that can be is compressed
        files = [file_of(runs, tail) for runs, tail in versions]
        edited = bytearray(files[-1])
        for page, other in edits:
            if (page + 1) * PAGE <= len(edited):
                edited[page * PAGE : (page + 1) * PAGE] = PAGES[other]
        files.append(bytes(edited))
        contents: list[Content] = []
        for number, data in enumerate(files):
            Path(folder, str(number)).write_bytes(data)
            with store.writer(label="test", threads=threads, nice=0) as writer:
                contents.append(writer.add_file(Path(folder, str(number))))
                stats = writer.finish()
            assert stats.bytes_total == len(data)
        for content, data in zip(contents, files, strict=True):
            assert content.size == sum(chunk.length for chunk in content.chunks) == len(data)
            reader = Store.open(f"{folder}/store") if fresh else store
            assert reader.read_bytes(content) == data
            reader.read_file(content, Path(folder, "back"), threads=threads)
            assert Path(folder, "back").read_bytes() == data
        with store.writer(label="again", threads=threads, nice=0) as writer:
            for number in range(len(files)):
                writer.add_file(Path(folder, str(number)))
            assert writer.finish().bytes_new == 0
