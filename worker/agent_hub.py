"""Who watches the pods of this node, and what each watcher has not seen yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from moorage.v1.types_pb2 import PodStatus

PodKey = tuple[str, int, int]  # job, incarnation, pod


def key_of(status: PodStatus) -> PodKey:
    """The pod that a status is about."""
    return status.job, status.incarnation, status.pod


class Hub:
    """Hands every change to every watcher. A slow watcher gets the newest status of each pod, not all between."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()

    def publish(self, status: PodStatus) -> None:
        """Tell all watchers. Keeps ``status``; the caller must not change it afterwards."""
        for watcher in self._watchers:
            watcher.add(status)

    async def watch(self, current: Callable[[], Iterable[PodStatus]]) -> AsyncIterator[PodStatus]:
        """All pods as ``current`` tells them, then one status with an empty job, then every change, without end."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            for status in current():
                yield status
            yield PodStatus()
            while True:
                await watcher.event.wait()
                for status in watcher.take():
                    yield status
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._pending: dict[PodKey, PodStatus] = {}

    def add(self, status: PodStatus) -> None:
        # Taken out first, so that the order of the dictionary is that of the newest changes.
        self._pending.pop(key_of(status), None)
        self._pending[key_of(status)] = status
        self.event.set()

    def take(self) -> list[PodStatus]:
        self.event.clear()
        pending, self._pending = list(self._pending.values()), {}
        return pending
