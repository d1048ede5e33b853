"""The pinned ring: many threads, each with two slots, so that the link and the store work at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from moorage.worker.gpu.device import Device, Slot

T = TypeVar("T")

#: A file in memory takes 1 to 2.5 GB/s from one processor, so it takes many to keep up with the link.
THREADS: Final = max(2, min(16, os.cpu_count() or 1))


def threads_for(devices: int) -> int:
    """How many threads serve so many GPUs at once."""
    return max(THREADS, min(THREADS * devices, os.cpu_count() or 1))


def at_once(work: Sequence[Callable[[], T]]) -> list[T]:
    """Do all of it side by side. The first error is raised when all have ended."""
    if len(work) == 1:
        return [work[0]()]
    if not work:
        return []
    with ThreadPoolExecutor(len(work), thread_name_prefix="gpu") as pool:
        futures = [pool.submit(one) for one in work]
    return [future.result() for future in futures]


class _Shared(Generic[T]):
    """Items that several threads share out among themselves, each item once; none after `stop`."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._items)


def share_out(
    slots: Sequence[Slot],
    items: Iterable[T],
    work: Callable[[Slot, Slot, Iterator[T]], None],
    *,
    threads: int = THREADS,
    nice: int = 0,
) -> None:
    """``work(slot, other, items)`` in as many threads as there are pairs of slots, until no item is left.

    Each thread takes its items from the iterator that it is given. The first error is raised when all have ended; the
    others then take no new item.
    """
    shared = _Shared(items)

    def one(number: int) -> None:
        try:
            with slots[2 * number].busy:  # another pod may be at it
                work(slots[2 * number], slots[2 * number + 1], shared)
        except BaseException:
            shared.stop()
            raise

    def lower() -> None:
        if nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)  # on Linux of the thread alone

    count = min(threads, len(slots) // 2)
    with ThreadPoolExecutor(count, thread_name_prefix="gpu-ring", initializer=lower) as pool:
        errors = [done.exception() for done in [pool.submit(one, number) for number in range(count)]]
    for error in errors:
        if error is not None:
            raise error


def pump(
    device: Device,
    items: Iterable[T],
    begin: Callable[[T, Slot], None],
    take: Callable[[T, Slot], None],
    *,
    nice: int = 0,
) -> None:
    """``begin`` to bring each item to a slot of the device's ring, ``take`` it from there while the next one comes.

    In many threads, as `share_out` says.
    """

    def work(slot: Slot, other: Slot, mine: Iterator[T]) -> None:
        before: tuple[T, Slot] | None = None
        try:
            for item in mine:
                begin(item, slot)
                if before is not None:
                    take(*before)
                device.wait()
                before = item, slot
                slot, other = other, slot
            if before is not None:
                take(*before)
        finally:
            device.wait()  # nothing may be copied to a slot that is another's

    share_out(device.slots(), items, work, nice=nice)
