"""Hosts on one folder, with logical time, that can die at any operation on the storage."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from moorage.store.backend import Data, Entry, Sink
from moorage.store.leases import Lease, LeaseInfo, Role
from moorage.store.posix import PosixBackend


class Killed(BaseException):
    """The host is dead."""


class InlineExecutor:
    """Stands in for a thread pool, so that a run can be repeated exactly."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *arguments: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


class SharedLeases:
    """Leases of all hosts. An expired lease is not listed any more, though its holder may not know yet."""

    def __init__(self) -> None:
        self.alive: dict[str, LeaseInfo] = {}
        self.count = 0

    def acquire(self, role: Role, label: str, roots: Sequence[str] = ()) -> Lease:
        self.count += 1
        info = LeaseInfo(id=f"{self.count:024x}", role=role, label=label, roots=list(roots))
        self.alive[info.id] = info
        return _SharedLease(self, info)

    def active(self) -> list[LeaseInfo]:
        return list(self.alive.values())


class _SharedLease:
    def __init__(self, keeper: SharedLeases, info: LeaseInfo) -> None:
        self._keeper = keeper
        self.info = info

    def valid(self) -> bool:
        return True  # the worst case: the holder was stopped between looking and writing

    def close(self) -> None:
        self._keeper.alive.pop(self.info.id, None)


class World:
    """What all hosts share: the folder, the leases, logical time."""

    def __init__(self) -> None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-store-", dir=base))
        self.leases = SharedLeases()
        self.time = 1000
        self.interrupts: dict[str, Callable[[], None]] = {}

    def tick(self) -> int:
        self.time += 1
        return self.time

    def hit(self, name: str) -> None:
        if (action := self.interrupts.pop(name, None)) is not None:
            action()


class HostBackend(PosixBackend):
    """A host's view of the folder; after ``left`` operations the host is dead."""

    def __init__(self, world: World) -> None:
        super().__init__(world.folder)
        self.world = world
        self.left = -1

    def step(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= self.left > 0

    def stamp(self, name: str) -> None:
        time = self.world.tick()
        with contextlib.suppress(FileNotFoundError):  # a pack that prune took from an expired writer
            os.utime(self.root / name, (time, time))

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        self.step()
        made = super().put(name, data, durable=durable)
        if made:
            self.stamp(name)
        return made

    def create(self, name: str) -> Any:
        self.step()
        sink = super().create(name)
        self.stamp(name)
        return _HostSink(self, sink, name)

    def open(self, name: str) -> Any:
        self.step()
        return super().open(name)

    def get(self, name: str) -> bytes:
        self.step()
        return super().get(name)

    def stat(self, name: str) -> Entry | None:
        self.step()
        return super().stat(name)

    def list(self, folder: str) -> Iterator[Entry]:
        self.step()
        return iter(sorted(super().list(folder)))

    def delete(self, name: str) -> bool:
        self.step()
        return super().delete(name)

    def touch(self, name: str) -> bool:
        self.step()
        found = super().touch(name)
        if found:
            self.stamp(name)
        return found

    def now(self) -> float:
        self.step()
        return float(self.world.time)


class _HostSink:
    def __init__(self, backend: HostBackend, sink: Sink, name: str) -> None:
        self._backend, self._sink, self._name = backend, sink, name

    def write(self, buffers: Sequence[Data]) -> None:
        self._backend.step()
        self._sink.write(buffers)
        self._backend.stamp(self._name)

    def finish(self) -> None:
        self._backend.step()
        self._sink.finish()

    def abort(self) -> None:
        if self._backend.left != 0:
            self._sink.abort()
