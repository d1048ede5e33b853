"""Is a checkpoint whole? And what does it take up?"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from moorage.errors import CorruptData, MoorageError, NotFound
from moorage.store import format as fmt
from moorage.store.index import Location

if TYPE_CHECKING:
    from moorage.store.store import Store

_BATCH = 64
_MOST_PROBLEMS = 100


class CheckResult(NamedTuple):
    """What was looked at, and one sentence for each thing that is wrong."""

    pods: int
    chunks: int
    bytes: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


class Usage(NamedTuple):
    """Of one kind of data: plain bytes, bytes as stored (with headers, each chunk once), distinct chunks."""

    bytes: int
    stored: int
    chunks: int


def check(
    store: Store, global_manifest: str, *, read_data: bool, progress: Callable[[int, int], None] | None
) -> CheckResult:
    """See `Store.check`."""
    # Not the index in memory: that may know a chunk from an index object that is damaged or gone by now.
    store = store.anew()
    store.index.refresh()
    problems = list(store.index.damaged.values())
    pods = 0
    chunks: dict[bytes, int] = {}
    for name in store.read_global_manifest(global_manifest).pods:
        try:
            manifest = store.read_pod_manifest(name)
        except NotFound:
            problems.append(f"pod manifest {name} is missing")
            continue
        except CorruptData as error:
            problems.append(error.message)
            continue
        pods += 1
        for kind, item, content in manifest.contents():
            if sum(chunk.length for chunk in content.chunks) != content.size:
                problems.append(f"{kind} {item} of pod {manifest.pod}: its chunks do not add up to its size")
        chunks.update(manifest.chunks())
    places = _places(store, chunks, problems)
    done, total = 0, sum(chunks.values())
    lock = threading.Lock()

    def verify(batch: list[tuple[Location, bytes]]) -> None:
        nonlocal done
        names = [name for _, name in batch]
        try:
            _read_all(store, names, chunks)
        except MoorageError:
            for name in names:  # one by one, to name each that is damaged
                try:
                    _read_all(store, [name], chunks)
                except MoorageError as error:
                    problems.append(error.message)
        with lock:
            done += sum(chunks[name] for name in names)
            if progress:
                progress(done, total)

    if read_data:
        batches = [places[i : i + _BATCH] for i in range(0, len(places), _BATCH)]
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="store-check") as pool:
            list(pool.map(verify, batches))
    elif progress:
        progress(total, total)
    return CheckResult(pods, len(chunks), total, problems[:_MOST_PROBLEMS])


def _read_all(store: Store, names: list[bytes], sizes: dict[bytes, int]) -> None:
    for _ in store.reader.groups({name: sizes[name] for name in names}):
        pass


def _places(store: Store, names: Iterable[bytes], problems: list[str]) -> list[tuple[Location, bytes]]:
    """Where the chunks lie, in the order of reading; what is not there, or behind its pack's end, is a problem."""
    found = []
    sizes: dict[str, int] = {}
    for name in names:
        place = store.index.locate(name)
        if place is None:
            problems.append(f"chunk {name.hex()} is in no index")
            continue
        if place.pack not in sizes:
            entry = store.backend.stat(f"packs/{place.pack}")
            sizes[place.pack] = entry.size if entry else -1
            if entry is None:
                problems.append(f"pack {place.pack} is missing")
        if 0 <= sizes[place.pack] < place.offset + place.stored:
            problems.append(f"chunk {name.hex()}: pack {place.pack} is cut short")
        found.append((place, name))
    return sorted(found)


def usage(store: Store, global_manifest: str) -> dict[str, Usage]:
    """See `Store.usage`."""
    seen: dict[bytes, None] = {}
    totals: dict[str, list[int]] = {}
    for name in store.read_global_manifest(global_manifest).pods:
        for kind, _, content in store.read_pod_manifest(name).contents():
            total = totals.setdefault(kind, [0, 0, 0])
            total[0] += content.size
            for chunk in content.chunks:
                if chunk.name and chunk.name not in seen:
                    seen[chunk.name] = None
                    place = store.index.locate(chunk.name)
                    total[1] += place.stored + fmt.CHUNK_HEADER if place else 0
                    total[2] += 1
    return {kind: Usage(*total) for kind, total in totals.items()}
