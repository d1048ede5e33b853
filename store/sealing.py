"""Encryption at rest: AES-256-GCM for each chunk and object, and the wrapping of a store's secret.

A store's 24-byte nonces are random. The first half chooses a key derived from the store's data key, the second half is
GCM's own nonce: no store holds so much that two of them would meet. What is authenticated beside the bytes is the whole
header before them (lengths, codec, name, nonce), and for an object at a path of the caller's choice the path as well.
"""

from __future__ import annotations

import secrets

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moorage.errors import CorruptData, EnvironmentLacking, NewerVersion

NONCE_BYTES = 24
TAG_BYTES = 16
WRAP_VERSION = 1
_HALF = NONCE_BYTES // 2
_ALTERED = "somebody or something altered it; use an earlier checkpoint"

Data = bytes | bytearray | memoryview


class Sealer:
    """Seals with one data key of 32 bytes. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _gcm(self, nonce: bytes) -> AESGCM:
        return AESGCM(blake3(nonce[:_HALF], key=self._key).digest())

    @staticmethod
    def nonce() -> bytes:
        """`NONCE_BYTES` random bytes."""
        return secrets.token_bytes(NONCE_BYTES)

    def seal(self, nonce: bytes, plain: Data, bound: bytes) -> bytes:
        """``plain`` encrypted, `TAG_BYTES` longer; ``bound`` has to be the same when it is opened."""
        return self._gcm(nonce).encrypt(nonce[_HALF:], plain, bound)

    def open(self, nonce: bytes, sealed: Data, bound: Data, where: str) -> bytes:
        """The reverse of `seal`. Raises `CorruptData` (``where`` names the thing) when a single bit differs."""
        try:
            return self._gcm(nonce).decrypt(nonce[_HALF:], bytes(sealed), bytes(bound))
        except (InvalidTag, ValueError):  # too short to be a nonce or a tag
            raise CorruptData(f"{where}: the encrypted bytes are not those that were written", _ALTERED) from None


class _Wrapped(msgspec.Struct, frozen=True, kw_only=True):
    format: str = "moorage-wrapped-key"
    version: int = WRAP_VERSION
    cipher: str = "aes-256-gcm"
    nonce: str
    wrapped: str


def wrapping_key_id(key: bytes) -> str:
    """16 hex digits that tell wrapping keys apart and say nothing about them."""
    return blake3(key, derive_key_context="moorage store 1 wrapping key id").hexdigest()[:16]


def wrap(key: bytes, secret: bytes, bound: str) -> bytes:
    """A store's secret as a small JSON file that only ``key`` opens; ``bound`` says which store and secret it is."""
    nonce = Sealer.nonce()
    sealed = Sealer(key).seal(nonce, secret, bound.encode())
    return msgspec.json.format(msgspec.json.encode(_Wrapped(nonce=nonce.hex(), wrapped=sealed.hex()))) + b"\n"


def unwrap(key: bytes, data: bytes, bound: str, where: str) -> bytes:
    """The reverse of `wrap`. Raises `CorruptData`, `NewerVersion`, `EnvironmentLacking` (another key)."""
    try:
        found = msgspec.json.decode(data, type=_Wrapped)
        nonce, sealed = bytes.fromhex(found.nonce), bytes.fromhex(found.wrapped)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptData(f"{where}: {error}", "put it back from a copy") from None
    if found.version > WRAP_VERSION or found.cipher != "aes-256-gcm":
        raise NewerVersion(f"{where} has version {found.version}, cipher {found.cipher}", "upgrade moorage here")
    try:
        return Sealer(key).open(nonce, sealed, bound.encode(), where)
    except CorruptData:
        raise EnvironmentLacking(
            f"{where}: the wrapping key does not open it", "give the key that it was wrapped with"
        ) from None
