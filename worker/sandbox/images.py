"""CRIU's image files: lists of protobuf messages, read and written with only the fields that moorage touches.

Fields that are not declared here are kept as they are (protobuf carries unknown fields along). Numbers and types are
those of CRIU's ``images/*.proto``.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from moorage.errors import CorruptData

_COMMON_MAGIC: Final = 0x54564319
_SERVICE_MAGIC: Final = 0x55105940
_IRMAP_MAGIC: Final = 0x57004059
_STATISTICS_FILE: Final = "stats-dump"
#: In the folder where a dump works.
PATHS_FILE: Final = "irmap-cache"
_HEAD: Final = struct.Struct("<II")
_SIZE: Final = struct.Struct("<I")

TYPE_REGULAR, TYPE_EVENTFD, TYPE_TIMERFD = 1, 6, 17
REMAP_LINKED: Final = 0

_KINDS: Final = {
    "u32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
    "u64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "i32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}
#: Message → (field, number, kind or message, with * when repeated).
_MESSAGES: Final[dict[str, tuple[tuple[str, int, str], ...]]] = {
    "regular": (("id", 1, "u32"), ("name", 6, "bytes")),
    "timerfd": (
        ("id", 1, "u32"), ("ticks", 5, "u64"), ("value_seconds", 7, "u64"), ("value_nanoseconds", 8, "u64"),
        ("interval_seconds", 9, "u64"), ("interval_nanoseconds", 10, "u64"),
    ),
    "eventfd": (("id", 1, "u32"), ("counter", 4, "u64")),
    "file": (
        ("type", 1, "u32"), ("id", 2, "u32"), ("regular", 3, "regular"), ("eventfd", 8, "eventfd"),
        ("timerfd", 12, "timerfd"),
    ),
    "descriptor": (("id", 1, "u32"), ("fd", 4, "u32")),
    "ids": (("files_id", 2, "u32"),),
    "remap": (("orig_id", 1, "u32"), ("remap_id", 2, "u32"), ("remap_type", 3, "u32")),
    "posix_timer": (("it_id", 1, "u32"), ("notify_thread_id", 11, "i32")),
    "timers": (("posix", 4, "posix_timer*"),),
    "task": (("task_state", 1, "u32"), ("exit_code", 2, "u32"), ("timers", 7, "timers")),
    "core": (("mtype", 1, "u32"), ("task", 3, "task")),
    "lock": (
        ("flag", 1, "u32"), ("type", 2, "u32"), ("pid", 3, "i32"), ("fd", 4, "i32"), ("start", 5, "u64"),
        ("length", 6, "u64"),
    ),
    "dump_times": (("frozen", 2, "u32"), ("memory", 3, "u32"), ("written", 4, "u32")),
    "statistics": (("dump", 1, "dump_times"),),
    "packet": (("id_for", 1, "u32"), ("length", 2, "u32"), ("scm", 4, "bytes*")),
    "irmap": (("device", 1, "u32"), ("inode", 2, "u64"), ("path", 3, "bytes")),
}  # fmt: skip


@functools.cache
def message(name: str) -> Any:
    """The class of one of the messages above."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"criu.{name}"))


@functools.cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="criu-subset.proto", package="criu", syntax="proto2")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, number, kind in fields:
            repeated, kind = kind.endswith("*"), kind.rstrip("*")
            label = descriptor_pb2.FieldDescriptorProto
            added = described.field.add(name=field, number=number)
            added.label = label.LABEL_REPEATED if repeated else label.LABEL_OPTIONAL
            if kind in _KINDS:
                added.type = _KINDS[kind]
            else:
                added.type, added.type_name = label.TYPE_MESSAGE, f".criu.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


#: Of images that CRIU leaves out when they would be empty (criu/include/magic.h).
LOCKS_MAGIC: Final = 0x54323616


def dump_times(work: Path) -> dict[str, float]:
    """What took CRIU how long, in seconds: all while the processes were stopped, taking their memory, writing it.

    Empty when CRIU wrote nothing of that; it is only told, nothing rests on it.
    """
    try:
        data = (work / _STATISTICS_FILE).read_bytes()[_HEAD.size + _SIZE.size :]
        found = message("statistics").FromString(data).dump
    except (OSError, DecodeError):
        return {}
    return {
        "criu": found.frozen / 1e6, "criu_memory": found.memory / 1e6, "criu_written": found.written / 1e6
    }  # fmt: skip


def read(path: Path, kind: str) -> tuple[int, list[Any]]:
    """The magic number of an image's kind, and its entries as messages ``kind``. Raises `CorruptData`."""
    data = path.read_bytes()
    entries = []
    try:
        common, magic = _HEAD.unpack_from(data)
        if common != _COMMON_MAGIC:
            raise CorruptData(f"{path.name} is no image of CRIU")
        at = _HEAD.size
        while at < len(data):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            if at + size > len(data):
                raise CorruptData(f"{path.name} ends in the middle of an entry")
            entries.append(message(kind).FromString(data[at : at + size]))
            at += size
    except (struct.error, DecodeError) as error:
        raise CorruptData(f"{path.name} cannot be read: {error}") from None
    return magic, entries


def _encode(magics: tuple[int, int], entries: Iterable[Any]) -> bytes:
    parts = [_HEAD.pack(*magics)]
    for entry in entries:
        body = entry.SerializeToString()
        parts += [_SIZE.pack(len(body)), body]
    return b"".join(parts)


def edit(path: Path, kind: str, change: Callable[[list[Any]], list[Any] | None], *, absent: int = 0) -> None:
    """Let ``change`` look at the entries of an image; what it returns is written, None leaves the file as it is.

    A file that is absent is left so, or made with the magic number ``absent``. Raises `CorruptData`.
    """
    if not (found := path.exists()) and not absent:
        return
    magic, entries = read(path, kind) if found else (absent, [])
    changed = change(entries)
    if changed is not None:
        path.write_bytes(_encode((_COMMON_MAGIC, magic), changed))


def edit_packets(path: Path, change: Callable[[list[tuple[Any, bytes]]], list[tuple[Any, bytes]] | None]) -> None:
    """As `edit`, of the image of what waits in sockets: each message ``packet`` with its data. Raises `CorruptData`."""
    if not path.exists():
        return
    data = path.read_bytes()
    found, at = [], _HEAD.size
    try:
        _, magic = _HEAD.unpack_from(data)
        while at < len(data):
            (size,) = _SIZE.unpack_from(data, at)
            entry = message("packet").FromString(data[at + _SIZE.size : at + _SIZE.size + size])
            at += _SIZE.size + size + entry.length
            if at > len(data):
                raise CorruptData(f"{path.name} ends in the middle of an entry")
            found.append((entry, data[at - entry.length : at]))
    except (struct.error, DecodeError) as error:
        raise CorruptData(f"{path.name} cannot be read: {error}") from None
    if (changed := change(found)) is not None:
        parts = [_encode((_COMMON_MAGIC, magic), [])]
        for entry, text in changed:
            body = entry.SerializeToString()
            parts += [_SIZE.pack(len(body)), body, text]
        path.write_bytes(b"".join(parts))


def write_paths(path: Path, found: Iterable[tuple[int, int, str]]) -> None:
    """Write CRIU's cache of (device, inode number, path), from which a dump learns where an inotify watch is."""
    entries = [message("irmap")(device=device, inode=inode, path=name.encode()) for device, inode, name in found]
    path.write_bytes(_encode((_SERVICE_MAGIC, _IRMAP_MAGIC), entries))
