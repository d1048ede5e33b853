"""Packets between a process of a job (the libcuda proxy in it) and the broker. Pure; docs/intercept.md is the contract.

Each packet of the SOCK_SEQPACKET socket is a header, one fixed structure, and for results a text; little-endian.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Final, NamedTuple

from moorage.errors import CorruptData

MAGIC: Final = 0x4350474D
VERSION: Final = 1
PACKET_MAX: Final = 64 * 1024

_HEADER: Final = struct.Struct("<IHHQII")
_HELLO: Final = struct.Struct("<QQIIIIQ16s")
_MEMORY: Final = struct.Struct("<QQQQQII")
_BLOCK: Final = struct.Struct("<QQ")
_FOUND: Final = struct.Struct("<iIQQQ")
_OUTCOME: Final = struct.Struct("<iIQ")
_NUMBER: Final = struct.Struct("<Q")


class Type(enum.IntEnum):
    """What a packet is: below 16 from the process, from 16 on from the broker."""

    HELLO = 1
    MEMORY = 2
    FORGET = 3
    RESULT = 4
    IDENTIFY = 5
    FETCH = 6
    EXPORTED = 7
    WELCOME = 16
    QUIESCE = 17
    EVICT = 18
    ADOPT = 19
    MAP = 20
    RESUME = 21
    STATUS = 22
    ANSWER = 23


class BlockFlag(enum.IntFlag):
    """Of a block that a process tells about."""

    DESCRIPTOR = 1
    FOREIGN = 2
    RDMA = 4
    BY_HANDLE = 8


DEADLINE: Final = -1
WRONG_STATE: Final = -2
MALFORMED: Final = -3
INCOMPLETE: Final = -4


class Hello(NamedTuple):
    """The process introduces itself; ``process`` survives checkpoints, ``pid`` is that of the pod's own namespace."""

    process: int
    incarnation: int
    pid: int
    level: int
    evicted: bool
    blocks: int
    bytes: int
    name: str


class Memory(NamedTuple):
    """A block of device memory, told with or without its descriptor. ``size`` in bytes."""

    id: int
    size: int
    address: int
    owner: int
    owner_id: int
    device: int
    flags: BlockFlag


class BlockName(NamedTuple):
    """A block by the process that made it and its number there."""

    process: int
    id: int


class Outcome(NamedTuple):
    """The answer to a command: 0, a CUresult, or one of the negative numbers above."""

    status: int
    blocks: int
    bytes: int
    text: str


class Packet(NamedTuple):
    """One packet as it came: its type, its request number, what follows the header."""

    type: int
    request: int
    body: bytes


def pack(kind: Type, request: int, body: bytes = b"") -> bytes:
    """A packet as it travels."""
    return _HEADER.pack(MAGIC, VERSION, kind, request, len(body), 0) + body


def unpack(data: bytes) -> Packet:
    """The reverse of `pack`. Raises `CorruptData` for what is no packet of this version."""
    if len(data) < _HEADER.size:
        raise CorruptData(f"a packet of {len(data)} bytes from a process's CUDA proxy")
    magic, version, kind, request, length, _ = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or length != len(data) - _HEADER.size:
        raise CorruptData(f"a process's CUDA proxy speaks version {version}, not {VERSION}")
    return Packet(kind, request, data[_HEADER.size :])


def hello(body: bytes) -> Hello:
    """Raises `CorruptData`."""
    process, incarnation, pid, level, evicted, blocks, size, name = _fields(_HELLO, body)
    text = bytes(name).split(b"\0")[0].decode(errors="replace")
    return Hello(process, incarnation, pid, level, bool(evicted), blocks, size, text)


def memory(body: bytes) -> Memory:
    """Raises `CorruptData`."""
    number, size, address, owner, owner_id, device, flags = _fields(_MEMORY, body)
    return Memory(number, size, address, owner, owner_id, device, BlockFlag(flags))


def block(body: bytes) -> BlockName:
    """Raises `CorruptData`."""
    return BlockName(*_fields(_BLOCK, body))


def outcome(body: bytes) -> Outcome:
    """Raises `CorruptData`."""
    status, blocks, size = _fields(_OUTCOME, body)
    return Outcome(status, blocks, size, body[_OUTCOME.size :].decode(errors="replace"))


def pack_number(number: int) -> bytes:
    """The body of Welcome (incarnation) and Quiesce (milliseconds)."""
    return _NUMBER.pack(number)


def pack_block(name: BlockName) -> bytes:
    """The body of Adopt."""
    return _BLOCK.pack(*name)


def pack_found(status: int, name: BlockName, device: int, size: int) -> bytes:
    """The body of an Answer; ``status`` 0: found."""
    return _FOUND.pack(status, device, *name, size)


def _fields(form: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) < form.size:
        raise CorruptData(f"a packet of a process's CUDA proxy has {len(body)} bytes instead of {form.size}")
    return form.unpack_from(body)
