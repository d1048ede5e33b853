"""The bytes of packs, chunks and objects: pure encoding and decoding. ``docs/store.md`` has the tables.

Everything is little endian. Each header names its format version, codec, cipher, key and nonce. `CIPHER_GCM` is
`moorage.store.sealing`: first compressed, then encrypted, with the header (and an object's path) authenticated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import zstandard

from moorage.errors import CorruptData, NewerVersion
from moorage.store.sealing import TAG_BYTES, Sealer

FORMAT = 1
CODEC_RAW = 0
CODEC_ZSTD = 1
CIPHER_NONE = 0
CIPHER_GCM = 1

_CHUNK = struct.Struct("<4sBBBB8s24sII32s")
_PACK = struct.Struct("<8sB7x8s16s16s8x")
_OBJECT = struct.Struct("<8sBBBB8s24sQQ32s4x")
_ENTRY = struct.Struct("<32sQII")
_CHUNK_MAGIC = b"mChk"
_PACK_MAGIC = b"mrgPack\0"
_OBJECT_MAGIC = b"mrgObjt\0"
_NO_NONCE = bytes(24)

CHUNK_HEADER = _CHUNK.size
PACK_HEADER = _PACK.size
OBJECT_HEADER = _OBJECT.size
ENTRY = _ENTRY.size
NAME_BYTES = 32
LARGEST_CHUNK = 16 << 20

KIND_INDEX = 1
KIND_POD = 2
KIND_GLOBAL = 3
KIND_BLOB = 4
KIND_CONDEMNED = 5
KIND_LEASE = 6
KIND_PRUNE = 7


class ChunkHeader(NamedTuple):
    """What stands before a chunk's stored bytes in a pack. ``name`` is the keyed BLAKE3 of the plain bytes."""

    name: bytes
    codec: int
    plain: int
    stored: int
    cipher: int = CIPHER_NONE
    nonce: bytes = _NO_NONCE


class PackEntry(NamedTuple):
    """One chunk of a pack, as an index object lists it. ``offset`` is that of the header, ``stored`` without it."""

    name: bytes
    offset: int
    stored: int
    plain: int


def chunk_header(header: ChunkHeader, key_id: bytes) -> bytes:
    """The `CHUNK_HEADER` bytes for ``header``; ``key_id`` is 8 bytes long."""
    name, codec, plain, stored, cipher, nonce = header
    return _CHUNK.pack(_CHUNK_MAGIC, FORMAT, codec, cipher, 0, key_id, nonce, plain, stored, name)


def parse_chunk_header(data: bytes | bytearray | memoryview, offset: int, where: str) -> ChunkHeader:
    """Decode the header at ``offset``. Raises `CorruptData` (``where`` names the place), `NewerVersion`."""
    try:
        magic, version, codec, cipher, _, _, nonce, plain, stored, name = _CHUNK.unpack_from(data, offset)
    except struct.error:
        raise CorruptData(f"{where}: cut short inside a chunk's header") from None
    if magic != _CHUNK_MAGIC:
        raise CorruptData(f"{where}: no chunk header there")
    if version > FORMAT or codec > CODEC_ZSTD or cipher > CIPHER_GCM:
        raise newer(f"{where}: chunk of format {version}, codec {codec}, cipher {cipher}")
    if not version or plain > LARGEST_CHUNK or stored > LARGEST_CHUNK + (1 << 16):
        raise CorruptData(f"{where}: the chunk's header makes no sense")
    return ChunkHeader(name, codec, plain, stored, cipher, nonce)


def is_raw(data: bytes | bytearray | memoryview, offset: int, name: bytes, length: int) -> bool:
    """Whether the header at ``offset`` is that of this very chunk, stored as it is. The way for many chunks.

    False says nothing more: `parse_chunk_header` finds out what is there instead.
    """
    magic, version, codec, cipher, _, _, _, plain, stored, found = _CHUNK.unpack_from(data, offset)
    return (
        found == name
        and plain == stored == length
        and codec == CODEC_RAW
        and not cipher
        and magic == _CHUNK_MAGIC
        and version == FORMAT
    )


def seal_chunk(
    sealer: Sealer | None, name: bytes, codec: int, plain: int, payload: bytes | memoryview, key_id: bytes
) -> tuple[ChunkHeader, bytes | memoryview]:
    """Header and stored bytes of a chunk of ``plain`` bytes whose (perhaps compressed) bytes are ``payload``."""
    if sealer is None:
        return ChunkHeader(name, codec, plain, len(payload)), payload
    header = ChunkHeader(name, codec, plain, len(payload) + TAG_BYTES, CIPHER_GCM, sealer.nonce())
    return header, sealer.seal(header.nonce, payload, chunk_header(header, key_id))


def open_chunk(
    sealer: Sealer | None, header: ChunkHeader, head: memoryview, stored: memoryview, where: str
) -> memoryview:
    """The reverse of `seal_chunk`: the bytes, still compressed. ``head`` is the header as it stands in the pack.

    Raises `CorruptData` when a bit differs, or when the chunk is not encrypted in a store that is, or the reverse.
    """
    check_cipher(sealer, header.cipher, where)
    if sealer is None:
        return stored
    return memoryview(sealer.open(header.nonce, stored, head, where))


def check_cipher(sealer: Sealer | None, cipher: int, where: str) -> None:
    """Raises `CorruptData` unless encrypted things are all that an encrypted store holds."""
    if (cipher == CIPHER_NONE) != (sealer is None):
        found = "not encrypted" if cipher == CIPHER_NONE else "encrypted"
        raise CorruptData(f"{where} is {found}, which nothing else in this store is", "use an earlier checkpoint")


def pack_header(key_id: bytes, nonce: bytes, pack: str) -> bytes:
    """The first `PACK_HEADER` bytes of the pack ``pack`` (32 hex digits) of the store with ``nonce`` (16 bytes)."""
    return _PACK.pack(_PACK_MAGIC, FORMAT, key_id, nonce, bytes.fromhex(pack))


def check_pack_header(data: bytes | memoryview, nonce: bytes, pack: str) -> None:
    """Raises `CorruptData` if ``data`` is not the head of that pack of that store, `NewerVersion`."""
    if len(data) < PACK_HEADER:
        raise CorruptData(f"pack {pack} is cut short")
    magic, version, _, store, own = _PACK.unpack_from(data)
    if magic != _PACK_MAGIC or not version:
        raise CorruptData(f"pack {pack} does not begin like a pack")
    if version > FORMAT:
        raise newer(f"pack {pack} has format {version}")
    if own.hex() != pack:
        raise CorruptData(f"pack {pack} says that it is pack {own.hex()}")
    if store != nonce:
        raise CorruptData(f"pack {pack} belongs to another store")


def encode_object(
    kind: int, payload: bytes, key_id: bytes, digest: bytes, sealer: Sealer | None = None, path: str = ""
) -> bytes:
    """A whole object (index, manifest, blob): header and payload, compressed if that makes it smaller.

    With ``sealer`` it is encrypted, and opens under ``path`` alone.
    """
    codec, stored = CODEC_RAW, payload
    if len(payload) > 512:
        packed = zstandard.ZstdCompressor(level=1).compress(payload)
        if len(packed) < len(payload) * 0.9:
            codec, stored = CODEC_ZSTD, packed
    cipher, nonce, length = CIPHER_NONE, _NO_NONCE, len(stored)
    if sealer is not None:
        cipher, nonce, length = CIPHER_GCM, sealer.nonce(), length + TAG_BYTES
    head = _OBJECT.pack(_OBJECT_MAGIC, FORMAT, codec, cipher, kind, key_id, nonce, len(payload), length, digest)
    return head + (stored if sealer is None else sealer.seal(nonce, stored, head + path.encode()))


def decode_object(
    data: bytes, kind: int, where: str, sealer: Sealer | None = None, path: str = ""
) -> tuple[bytes, bytes]:
    """``(payload, digest)`` of what `encode_object` made; the caller compares the digest.

    Raises `CorruptData` when it is cut short, altered in a way that shows, or of another kind; `NewerVersion`.
    """
    if len(data) < OBJECT_HEADER:
        raise CorruptData(f"{where} is cut short")
    magic, version, codec, cipher, found, _, nonce, plain, stored, digest = _OBJECT.unpack_from(data)
    if magic != _OBJECT_MAGIC or not version:
        raise CorruptData(f"{where} is not an object of a moorage store")
    if version > FORMAT or codec > CODEC_ZSTD or cipher > CIPHER_GCM:
        raise newer(f"{where} has format {version}, codec {codec}, cipher {cipher}")
    body = memoryview(data)[OBJECT_HEADER:]
    if len(body) != stored:
        raise CorruptData(f"{where} is cut short: {len(body)} of {stored} bytes")
    if found != kind:
        raise CorruptData(f"{where} is an object of another kind")
    check_cipher(sealer, cipher, where)
    if sealer is not None:
        body = memoryview(sealer.open(nonce, body, data[:OBJECT_HEADER] + path.encode(), where))
    payload = bytes(body) if codec == CODEC_RAW else decompress(body, plain, where)
    if len(payload) != plain:
        raise CorruptData(f"{where} has {len(payload)} bytes where {plain} belong")
    return payload, digest


def decompress(data: bytes | bytearray | memoryview, plain: int, where: str) -> bytes:
    """Raises `CorruptData` unless ``data`` is a zstd frame of exactly ``plain`` bytes."""
    try:
        payload = zstandard.ZstdDecompressor().decompress(data, max_output_size=plain)
    except (zstandard.ZstdError, OverflowError, MemoryError) as error:
        # A damaged length can be any number, also one that no buffer can have.
        raise CorruptData(f"{where}: {error}") from None
    if len(payload) != plain:
        raise CorruptData(f"{where} has {len(payload)} bytes where {plain} belong")
    return payload


def encode_entries(entries: list[PackEntry]) -> bytes:
    """Index entries of one pack as bytes: 48 for each."""
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def decode_entries(data: bytes, where: str) -> Iterator[PackEntry]:
    """The reverse of `encode_entries`. Raises `CorruptData`."""
    if len(data) % _ENTRY.size:
        raise CorruptData(f"{where} is cut short")
    return map(PackEntry._make, _ENTRY.iter_unpack(data))


def newer(what: str) -> NewerVersion:
    """The error for something that a later release wrote."""
    return NewerVersion(what, f"this moorage knows formats up to {FORMAT}: upgrade moorage on this machine")
