"""A join token: all that a fresh machine needs to make its first call, for a few minutes.

It holds a client certificate of the role ``join`` with its key, so that even this call is mutual TLS, and may call
nothing but `Join`. Whoever has it can bring one machine into the cluster: hand it over like a password, in a file.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from pathlib import Path

import msgspec

from moorage.errors import NotFound, UsageError

PREFIX = "moorage-join-1."


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a token. PEM as bytes; ``node`` empty: any new node."""

    coordinators: list[str]
    ca: bytes
    certificate: bytes
    key: bytes
    node: str = ""

    def encode(self) -> str:
        """The token as one word."""
        packed = zlib.compress(msgspec.msgpack.encode(self), 9)
        return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(text: str) -> JoinToken:
    """What `JoinToken.encode` made. Raises `UsageError` for anything else."""
    text = text.strip()
    if not text.startswith(PREFIX):
        raise UsageError("this is no join token", "make one: moorage node token")
    body = text.removeprefix(PREFIX)
    try:
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        unpacked = zlib.decompressobj().decompress(packed, 1 << 20)
        return msgspec.msgpack.decode(unpacked, type=JoinToken)
    except (binascii.Error, zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise UsageError("this join token is damaged", "copy it whole, or make another: moorage node token") from error


def read(source: str, stdin: str = "") -> JoinToken:
    """The token in a file; ``-``: in what was read from ``stdin``. Raises `NotFound`, `UsageError`."""
    if source.startswith(PREFIX):
        raise UsageError(
            "a token on the command line is there for every user of this machine to read",
            "put it into a file and name that, or give it on stdin: --token -",
        )
    if source == "-":
        return decode(stdin)
    try:
        return decode(Path(source).read_text())
    except OSError as error:
        raise NotFound(f"token file {source} cannot be read: {error.strerror}", "name another") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} holds no join token", "make one: moorage node token") from error
