"""Reading a pod's journal as it stands in the store: in a checkpoint, or archived when the job had ended. Pure.

The bytes are those that the worker writes: a header (magic, offset of the first byte, offset of the end, length of the
index), the index, which is for the worker alone, then frames::

    u32 magic | u32 crc32 of all that follows
    u8 kind | u8 flags | u16 payload length | u32 rank | u64 sequence | u64 time in ns | payload
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from moorage.errors import CorruptData
from moorage.v1.worker_pb2 import LogChunk

_EXPORT = struct.Struct("<8sQQQ")
_EXPORT_MAGIC = b"MOGJRNL1"
_HEADER = struct.Struct("<IIBBHIQQ")
_MAGIC = 0x31474F4D
_STDOUT, _STDERR, _LOST = 1, 2, 6
_CHUNK_BYTES = 256 << 10


def bounds(data: bytes) -> tuple[int, int]:
    """Offsets in the journal at which ``data`` begins and ends. Raises `CorruptData`."""
    if len(data) < _EXPORT.size or not data.startswith(_EXPORT_MAGIC):
        raise CorruptData("the log is not a pod's journal")
    _, start, end, _ = _EXPORT.unpack_from(data)
    return start, end


def chunks(data: bytes, *, pod: int, rank: int, offset: int) -> Iterator[LogChunk]:
    """The output from ``offset`` on, of one ``rank`` or (-1) of all; neighbours of one stream joined.

    Bytes that are no frame end it: what was cut short is not shown. Raises `CorruptData`.
    """
    start, _ = bounds(data)
    truncated = offset < start
    joined: LogChunk | None = None
    first = _EXPORT.size + int(_EXPORT.unpack_from(data)[3])
    at = first + max(0, offset - start)
    while at + _HEADER.size <= len(data):
        magic, checksum, kind, _, length, who, _, time_ns = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length
        if magic != _MAGIC or end > len(data) or zlib.crc32(data[at + 8 : end]) != checksum:
            break
        payload = data[at + _HEADER.size : end]
        at = end
        after = start + end - first
        truncated = truncated or kind == _LOST
        if kind not in (_STDOUT, _STDERR) or rank not in (-1, who):
            continue
        if joined is not None and (
            truncated
            or (joined.rank, joined.is_stderr) != (who, kind == _STDERR)
            or len(joined.data) + length > _CHUNK_BYTES
        ):
            yield joined
            joined = None
        if joined is None:
            joined = LogChunk(rank=who, is_stderr=kind == _STDERR, time=time_ns / 1e9, pod=pod, truncated=truncated)
            truncated = False
        joined.data += payload
        joined.offset = after
    if joined is not None:
        yield joined
