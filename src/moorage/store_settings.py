"""How a store is reached and opened beyond its location: the table ``[store_settings]`` of the daemons' files.

No secret stands here: keys and passwords are named by the file or the command that has them.
"""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from moorage.errors import EnvironmentLacking, NotFound, UsageError

KEY_VARIABLE = "MOORAGE_KEY"
WRAPPING_KEY_BYTES = 32
_COMMAND_SECONDS = 60
_FORMS = "a key is 32 bytes: as they are, as 64 hex digits or as base64 (moorage store new-key FILE makes one)"


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``endpoint`` to ``profile`` are for S3; what is not given comes from the usual ``AWS_*`` variables and files.

    ``key_file`` or ``key_command`` (its standard output) give the key that the store's own key is wrapped with; without
    either, the variable ``MOORAGE_KEY`` does. No key at all: a new store is not encrypted.
    """

    endpoint: str = ""
    region: str = ""
    credentials_file: str = ""
    profile: str = ""
    request_seconds: float = 60.0  # one request may take so long
    retry_seconds: float = 90.0  # after that, a request that fails is not tried again
    key_file: str = ""
    key_command: list[str] = []
    cache_bytes: int = 64 << 30  # a worker's local copies of what lies in S3 may take so much


class WrappingKey(msgspec.Struct, frozen=True):
    """A wrapping key in memory. It shows nothing of itself where it is printed or logged."""

    key: bytes

    def __repr__(self) -> str:
        return "WrappingKey(...)"


def inherited_key(settings: StoreSettings, environ: Mapping[str, str] | None = None) -> WrappingKey | None:
    """The key if the environment alone has it: what another process has to be told. Raises `UsageError`."""
    if settings.key_file or settings.key_command:
        return None
    key = wrapping_key(settings, environ)
    return WrappingKey(key) if key is not None else None


def wrapping_key(settings: StoreSettings, environ: Mapping[str, str] | None = None) -> bytes | None:
    """The key that wraps the store's key; None: no encryption is wanted.

    Raises `NotFound` (no such file), `UsageError` (not a key), `EnvironmentLacking` (rights, the command failed).
    """
    environ = os.environ if environ is None else environ
    if settings.key_file:
        return key_of_file(Path(settings.key_file))
    if settings.key_command:
        return _parsed(_printed(settings.key_command), f"what {settings.key_command[0]} printed")
    if KEY_VARIABLE in environ:
        return _parsed(environ[KEY_VARIABLE].encode(), KEY_VARIABLE)
    return None


def key_of_file(path: Path) -> bytes:
    """The key in a file that nobody else may read. Raises `NotFound`, `UsageError`, `EnvironmentLacking`."""
    try:
        if path.stat().st_mode & 0o077:
            raise EnvironmentLacking(f"key file {path} can be read by others", f"chmod 600 {path}")
        return _parsed(path.read_bytes(), f"key file {path}")
    except OSError as error:
        raise NotFound(f"key file {path} cannot be read: {error.strerror}", "name the right file") from error


def _printed(command: list[str]) -> bytes:
    # What it prints on standard error may hold anything: it is not told on.
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {_COMMAND_SECONDS} s"
        raise EnvironmentLacking(f"key command {command[0]}: {reason}", "correct key_command") from None
    if done.returncode:
        raise EnvironmentLacking(f"key command {command[0]} ended with {done.returncode}", "run it by hand to see why")
    return done.stdout


def _parsed(data: bytes, where: str) -> bytes:
    if len(data) == WRAPPING_KEY_BYTES:
        return data
    text = data.strip()
    for decode in (bytes.fromhex, lambda text: base64.b64decode(text, validate=True)):
        try:
            key = decode(text.decode("ascii"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == WRAPPING_KEY_BYTES:
            return key
    raise UsageError(f"{where} is not a key", _FORMS)
