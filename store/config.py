"""A store's configuration: the object ``config``, written once when the store is created, and its key file."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from moorage.errors import CorruptData, EnvironmentLacking, NotFound, UsageError
from moorage.store import sealing
from moorage.store.backend import Backend
from moorage.store.format import newer
from moorage.store.keys import KEY_BYTES, StoreKey
from moorage.store.posix import PosixBackend
from moorage.store_settings import StoreSettings

STORE_VERSION = 1
FOLDERS = ("keys", "tmp", "packs", "index", "condemned", "prunes", "pods", "checkpoints", "objects", "leases")
ENCRYPTED = "aes-256-gcm"
_LACKING = "name it by key_file or key_command in [store_settings], or in MOORAGE_KEY"


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``nonce`` (32 hex digits) tells this store from every other; ``key`` names the file in ``keys/``.

    ``encryption`` is empty, or `ENCRYPTED`: then the key is wrapped, and everything that is stored is encrypted.
    """

    format: str = "moorage-store"
    version: int = STORE_VERSION
    nonce: str
    key: str
    created: float  # seconds since the epoch
    encryption: str = ""


class _Version(msgspec.Struct):
    format: str = ""
    version: int = 0


def remote(location: str) -> bool:
    """Whether the store lies in an object store, not in a folder."""
    return location.startswith("s3://")


def backend_of(location: str, settings: StoreSettings | None = None) -> Backend:
    """The storage that ``location`` names: ``/path``, ``file:///path`` or ``s3://bucket/prefix``.

    Raises `UsageError`, `EnvironmentLacking`.
    """
    if remote(location):
        from moorage.store.s3 import S3Backend  # only here: it needs an extra

        return S3Backend(location, settings or StoreSettings())
    if "://" in location:
        url = urlsplit(location)
        if url.scheme != "file":
            raise EnvironmentLacking(
                f"store {location}: this moorage has no {url.scheme} storage",
                "use a folder, /path or file:///path, or a bucket, s3://bucket/prefix",
            )
        if url.netloc not in ("", "localhost"):
            raise UsageError(f"store {location}: a file URL names no host", "write file:///path")
        location = unquote(url.path)
    path = Path(location)
    if not path.is_absolute():
        raise UsageError(f"store {location}: not an absolute path", "write /path or file:///path")
    return PosixBackend(path)


_COPY = "put it back from a copy; nothing in the store can be read without it"


def create(backend: Backend, wrapping: bytes | None = None) -> None:
    """Make an empty store unless there is one. When several hosts do it at once, the first configuration stands.

    ``wrapping``: it will be encrypted, and its key wrapped with this one.
    """
    backend.make_folders(FOLDERS)
    if backend.stat("config") is not None:
        return
    key = StoreKey.random(encrypted=wrapping is not None)
    config = StoreConfig(
        nonce=secrets.token_hex(16),
        key=key.id.hex(),
        created=time.time(),
        encryption=ENCRYPTED if wrapping is not None else "",
    )
    # The key first: a configuration must never name a key that is not there. If another host wins the race below,
    # this key is left over and harmless.
    if wrapping is None:
        backend.put(f"keys/{config.key}", key.secret.hex().encode() + b"\n")
    else:
        put_wrapped(backend, config, key, wrapping)
    backend.put("config", msgspec.json.format(msgspec.json.encode(config)) + b"\n")


def put_wrapped(backend: Backend, config: StoreConfig, key: StoreKey, wrapping: bytes) -> str:
    """Store the key wrapped with ``wrapping``. Returns the name of that object."""
    name = wrapped_name(config, wrapping)
    backend.put(name, sealing.wrap(wrapping, key.secret, _bound(config)))
    return name


def wrapped_name(config: StoreConfig, wrapping: bytes) -> str:
    """Where the store's key lies, wrapped with that key."""
    return f"keys/{config.key}.{sealing.wrapping_key_id(wrapping)}"


def _bound(config: StoreConfig) -> str:
    return f"moorage store {config.nonce} key {config.key}"


def read_config(backend: Backend) -> StoreConfig:
    """Raises `NotFound`, `NewerVersion`, `CorruptData`."""
    try:
        data = backend.get("config")
    except NotFound as error:
        if error.hint:  # a bucket that does not exist says more than this
            raise
        raise NotFound(
            f"{backend.location} is not a moorage store", "check the path; `moorage dev up` and the daemons create one"
        ) from None
    where = f"{backend.location}/config"
    try:
        head = msgspec.json.decode(data, type=_Version)
        if head.format != "moorage-store":
            raise CorruptData(f"{where} is not the configuration of a moorage store", _COPY)
        if head.version > STORE_VERSION:
            raise newer(f"store {backend.location} has version {head.version}")
        config = msgspec.json.decode(data, type=StoreConfig)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{where} is damaged: {error}", _COPY) from None
    if config.encryption not in ("", ENCRYPTED):
        raise newer(f"store {backend.location} is encrypted with {config.encryption}")
    return config


def load(backend: Backend, wrapping: bytes | None = None) -> tuple[StoreConfig, StoreKey]:
    """Read configuration and key. Raises `NotFound`, `NewerVersion`, `CorruptData`, `EnvironmentLacking`."""
    config = read_config(backend)
    if not config.encryption:
        if wrapping is not None:
            # Also what somebody would do who can write there and wants to read along: a configuration without it.
            raise EnvironmentLacking(
                f"store {backend.location} is not encrypted, and a key for it is given",
                "make a new store with the key, or name no key",
            )
        return config, _plain_key(backend, config)
    if wrapping is None:
        raise EnvironmentLacking(f"store {backend.location} is encrypted, and no key is given", _LACKING)
    name = wrapped_name(config, wrapping)
    try:
        data = backend.get(name)
    except NotFound:
        others = [entry.name for entry in backend.list("keys") if entry.name.startswith(f"keys/{config.key}.")]
        if others:
            raise EnvironmentLacking(
                f"the key that is given (id {sealing.wrapping_key_id(wrapping)}) is not the one that opens store "
                f"{backend.location} ({', '.join(sorted(other.rpartition('.')[2] for other in others))})",
                "give the right one; after a rotation that is the new one",
            ) from None
        raise NotFound(f"{backend.location}/{name}, the store's key, is missing", "put it back from a copy") from None
    where = f"{backend.location}/{name}"
    return config, _checked(sealing.unwrap(wrapping, data, _bound(config), where), config, where)


def _plain_key(backend: Backend, config: StoreConfig) -> StoreKey:
    name = f"keys/{config.key}"
    where = f"{backend.location}/{name}"
    try:
        secret = bytes.fromhex(backend.get(name).decode().strip())
    except NotFound:
        raise NotFound(f"{where}, the store's key, is missing", "put it back from a copy") from None
    except ValueError:
        raise CorruptData(f"{where} is not a key", "put it back from a copy") from None
    return _checked(secret, config, where)


def _checked(secret: bytes, config: StoreConfig, where: str) -> StoreKey:
    key = StoreKey(secret, encrypted=bool(config.encryption))
    if len(secret) != KEY_BYTES or key.id.hex() != config.key:
        raise CorruptData(f"{where} holds another key", "put it back from a copy")
    return key


def rotate(backend: Backend, old: bytes, new: bytes) -> list[str]:
    """Wrap the store's key with ``new`` and no longer with anything else. Returns the objects that were removed.

    May be called again when it was interrupted. Raises `EnvironmentLacking` if ``old`` does not open the store.
    """
    config = read_config(backend)
    fresh = wrapped_name(config, new)
    if backend.stat(fresh) is None:
        put_wrapped(backend, config, load(backend, old)[1], new)
    # It must be known to open before the other way in goes.
    load(backend, new)
    stale = [e.name for e in backend.list("keys") if e.name.startswith(f"keys/{config.key}.") and e.name != fresh]
    for name in stale:
        backend.delete(name)
    return stale
