"""Contexts of asynchronous I/O (io_setup): proof that none of their requests is in flight.

CRIU saves a context and the events that wait in it, but not requests that are under way, and no kernel tells whether
there are any. It counts them, though: a context has as many places as its ring has (but one), and who submits gets a
place or is told to come again. So as many requests as there are places left are submitted in the place of the process
(`inject`), each a read of nothing that is over at once. What is missing then is in flight. The events of these requests
are read away, and the ring holds what it held.

Each processor has some free places of its own, so the process submits on one after another. Places are handed to
processors in lots; what is less than a lot stays where it is (`reachable`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from moorage.errors import MoorageError
from moorage.worker.sandbox import inject

_IO_GETEVENTS, _IO_SUBMIT = 208, 209
_MAGIC = 0xA10A10A1
_HEAD = struct.Struct("=8I")  # id, number of places, head, tail, magic, three more
_EVENT_BYTES = 32
_REQUEST_BYTES = 64
_READ = 0  # IOCB_CMD_PREAD
_AT_ONCE = 1024
_RING = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ \d+ +/\[aio\]", re.MULTILINE)


class Ring(NamedTuple):
    """``places``: of events; ``head`` and ``tail``: where the next is read, and written by the kernel."""

    address: int
    places: int
    head: int
    tail: int

    @property
    def waiting(self) -> int:
        return (self.tail - self.head) % self.places


def in_use() -> bool:
    """Whether anybody on this machine has a context."""
    return int(Path("/proc/sys/fs/aio-nr").read_text()) > 0


def addresses(maps: str) -> list[int]:
    """Of the contexts in the text of ``/proc/<pid>/maps``. Pure."""
    return [int(found, 16) for found in _RING.findall(maps)]


def reachable(places: int, processors: int) -> int:
    """How many requests can have a place at once in a ring of so many, on a machine that may have so many processors:
    as fs/aio.c hands them out. Pure."""
    lot = max(1, (places - 1) // (processors * 4))
    return (places - 1) // lot * lot


def in_flight(host_pid: int) -> int:
    """Requests that are in flight in the contexts of this process, which `inject.held` has stopped.

    Raises `OSError`, `MoorageError`.
    """
    found = addresses(Path("/proc", str(host_pid), "maps").read_text())
    if not found:
        return 0
    with _everywhere(host_pid) as processors, inject.Stopped(host_pid) as calls:
        null = calls.call(inject.OPENAT, -100, calls.put(b"/dev/null"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return sum(_of_context(host_pid, address, calls, null, processors) for address in found)
        finally:
            calls.call(inject.CLOSE, null)


@contextlib.contextmanager
def _everywhere(tid: int) -> Iterator[list[int]]:
    """The processors that a thread may run on; afterwards it may run on these again."""
    before = os.sched_getaffinity(tid)
    try:
        yield sorted(before)
    finally:
        os.sched_setaffinity(tid, before)


def _of_context(pid: int, address: int, calls: inject.Stopped, null: int, processors: list[int]) -> int:
    with Path("/proc", str(pid), "mem").open("r+b", buffering=0) as memory:
        ring = _ring(memory, address)
        kept = b"".join(_at(memory, _event(ring, ring.head + number), _EVENT_BYTES) for number in range(ring.waiting))
        room = inject.MMAP, 0, ring.places * _EVENT_BYTES + _REQUEST_BYTES + 8 * _AT_ONCE + 16, 3, 0x22, -1, 0
        scratch = calls.call(*room)
        try:
            request = scratch + ring.places * _EVENT_BYTES
            memory.seek(request)
            memory.write(struct.pack("<QIIHhIQQqQII", 0, 0, 0, _READ, 0, null, scratch, 0, 0, 0, 0, 0))
            memory.write(struct.pack("=Q", request) * _AT_ONCE)
            wanted = reachable(ring.places, _possible()) - ring.waiting
            taken = 0
            for processor in processors:
                if taken < wanted:
                    os.sched_setaffinity(pid, {processor})
                    taken += _submit(calls, address, request, wanted - taken)
            # The kernel does not mix up what waited with what came now, but gives all of it in its order.
            _read_away(calls, address, scratch, ring.waiting + taken)
            if ring.waiting:
                _put_again(memory, calls, address, request, kept)
            return wanted - taken
        finally:
            calls.call(inject.MUNMAP, scratch, room[2])


def _submit(calls: inject.Stopped, context: int, request: int, most: int) -> int:
    taken = 0
    while taken < most:
        try:
            taken += calls.call(_IO_SUBMIT, context, min(_AT_ONCE, most - taken), request + _REQUEST_BYTES)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            break
    return taken


def _read_away(calls: inject.Stopped, context: int, into: int, number: int) -> None:
    while number:
        got = calls.call(_IO_GETEVENTS, context, 1, number, into, 0)
        if not got:
            raise MoorageError("events of asynchronous I/O did not come")
        number -= got


def _put_again(memory: FileIO, calls: inject.Stopped, address: int, request: int, kept: bytes) -> None:
    """Let events that had waited wait again: as many others, with what those said."""
    number = len(kept) // _EVENT_BYTES
    if _submit(calls, address, request, number) != number:
        raise MoorageError("events of asynchronous I/O could not be put back")
    ring = _ring(memory, address)
    for place in range(number):
        memory.seek(_event(ring, ring.head + place))
        memory.write(kept[place * _EVENT_BYTES : (place + 1) * _EVENT_BYTES])


def _event(ring: Ring, place: int) -> int:
    return ring.address + _HEAD.size + place % ring.places * _EVENT_BYTES


def _ring(memory: FileIO, address: int) -> Ring:
    _, places, head, tail, magic, *_ = _HEAD.unpack(_at(memory, address, _HEAD.size))
    if magic != _MAGIC or not places:
        raise MoorageError("a context of asynchronous I/O looks otherwise than it should")
    return Ring(address, places, head % places, tail % places)


def _at(memory: FileIO, address: int, size: int) -> bytes:
    memory.seek(address)
    return memory.read(size)


def _possible() -> int:
    """How many processors this machine may have."""
    total = 0
    for part in Path("/sys/devices/system/cpu/possible").read_text().strip().split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total
