"""The store's key and what is named with it. Every name in a store is a keyed BLAKE3, so that names tell nothing to
those who lack the key, and nobody can prepare two contents of one name.
"""

from __future__ import annotations

import secrets

from blake3 import blake3

from moorage.store.sealing import Sealer

KEY_BYTES = 32


class StoreKey:
    """A store's secret and the keys derived from it. ``secret`` is `KEY_BYTES` long. Never log it.

    ``sealer`` is there where the store is encrypted.
    """

    def __init__(self, secret: bytes, *, encrypted: bool = False) -> None:
        self.secret = secret
        self.chunks = self.derive("chunk names")
        self.objects = self.derive("object names")
        self.boundaries = self.derive("chunk boundaries")
        self.id = self.derive("key id")[:8]
        self.sealer = Sealer(self.derive("data encryption")) if encrypted else None

    @classmethod
    def random(cls, *, encrypted: bool = False) -> StoreKey:
        return cls(secrets.token_bytes(KEY_BYTES), encrypted=encrypted)

    def derive(self, purpose: str) -> bytes:
        """32 bytes for ``purpose`` that say nothing about the secret."""
        return blake3(self.secret, derive_key_context=f"moorage store 1 {purpose}").digest()

    def chunk_name(self, data: bytes | bytearray | memoryview) -> bytes:
        """The 32-byte name of a chunk. Lets other threads run while it hashes."""
        return blake3(data, key=self.chunks).digest()

    def object_digest(self, kind: int, data: bytes | memoryview) -> bytes:
        """The 32-byte digest of an object's plain payload; the kind is part of it."""
        return blake3(bytes([kind]), key=self.objects).update(data).digest()
