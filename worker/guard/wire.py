"""Length-prefixed msgpack over a stream: four bytes of length, then one message."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from moorage.errors import CorruptData

#: No message comes near this; a larger length means that the peer speaks something else.
MAX_MESSAGE = 4 << 20

_encoder = msgspec.msgpack.Encoder()


def pack(message: Any) -> bytes:
    """One message as it travels."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


async def unpack(reader: asyncio.StreamReader, *, limit: int = MAX_MESSAGE) -> bytes | None:
    """The next message's body; None at the end of the stream. Raises `CorruptData` on a length out of bounds."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > limit:
            raise CorruptData(f"a message of {length} bytes on a local socket")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
