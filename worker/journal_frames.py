"""The frames in which a pod's output travels and is kept. Pure.

``moorage-init`` writes one frame with each ``write`` to its stdout; the journal file holds the same bytes. A frame is
never longer than `FRAME_MAX` = PIPE_BUF, so the kernel writes it whole or not at all. Little-endian header::

    u32 magic | u32 crc32 of all that follows
    u8 kind | u8 flags | u16 payload length | u32 rank | u64 sequence | u64 time in ns | payload

``sequence`` counts the frames of one init from 1, through every checkpoint and restore, so a reader sees what is
missing or doubled. A reader that starts in the middle of a frame finds the next one by magic and checksum.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = 0x31474F4D  # "MOG1"
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_HEADER = struct.Struct("<IIBBHIQQ")
HEADER_SIZE = _HEADER.size
FRAME_MAX = 4096
PAYLOAD_MAX = FRAME_MAX - HEADER_SIZE

#: Set in frames that the guard made; their ``sequence`` is that of the init's frame before them.
FLAG_GUARD = 1


class Kind(enum.IntEnum):
    """What a frame says. The payload of numbers is little-endian, 4 bytes signed, unless said otherwise."""

    STDOUT = 1
    STDERR = 2
    STARTED = 3  # pid inside the pod
    EXITED = 4  # exit code; 128 + signal
    ENDED = 5  # exit code of the whole pod; the init's last frame
    LOST = 6  # by the guard: so many frames (8 bytes, unsigned) never arrived


class Frame(NamedTuple):
    """One frame. ``time_ns`` is since the epoch."""

    kind: int
    rank: int
    sequence: int
    time_ns: int
    payload: bytes
    flags: int = 0

    @property
    def number(self) -> int:
        """The payload of STARTED, EXITED and ENDED."""
        return int.from_bytes(self.payload[:4], "little", signed=True)


def encode(frame: Frame) -> bytes:
    """The frame's bytes. The payload must not be longer than `PAYLOAD_MAX`."""
    assert len(frame.payload) <= PAYLOAD_MAX
    body = _HEADER.pack(0, 0, frame.kind, frame.flags, len(frame.payload), frame.rank, frame.sequence, frame.time_ns)[
        8:
    ]
    body += frame.payload
    return struct.pack("<II", MAGIC, zlib.crc32(body)) + body


class Scanned(NamedTuple):
    """A frame and where it stands: ``[start, end)`` in the buffer that was scanned."""

    frame: Frame
    start: int
    end: int


def scan(data: bytes | bytearray | memoryview, start: int = 0) -> Iterator[Scanned]:
    """All whole and valid frames in ``data``, in order. Bytes that belong to none are passed over; a frame that is
    cut off at the end is not returned: the end of the last frame says where to go on."""
    view = memoryview(data)
    size = len(view)
    at = start
    while at + HEADER_SIZE <= size:
        magic, checksum, kind, flags, length, rank, sequence, time_ns = _HEADER.unpack_from(view, at)
        end = at + HEADER_SIZE + length
        if magic != MAGIC or length > PAYLOAD_MAX:
            at = _resume(view, at + 1)
            continue
        if end > size:
            return
        if zlib.crc32(view[at + 8 : end]) != checksum:
            at = _resume(view, at + 1)
            continue
        payload = bytes(view[at + HEADER_SIZE : end])
        yield Scanned(Frame(kind, rank, sequence, time_ns, payload, flags), at, end)
        at = end


def _resume(view: memoryview, at: int) -> int:
    found = bytes(view[at:]).find(_MAGIC_BYTES)
    return len(view) if found < 0 else at + found


class RankTable:
    """What the frames say of the ranks so far."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.exits: dict[int, int] = {}
        self.ended: int | None = None

    def see(self, frame: Frame) -> None:
        """Take in one frame."""
        if frame.kind == Kind.STARTED:
            self.pids[frame.rank] = frame.number
        elif frame.kind == Kind.EXITED:
            self.exits[frame.rank] = frame.number
            self.pids.setdefault(frame.rank, 0)  # 0: never started, because another rank had failed before
        elif frame.kind == Kind.ENDED:
            self.ended = frame.number
