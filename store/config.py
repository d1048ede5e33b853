"""A store's configuration: the object ``config``, written once when the store is created, and its key file."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from moorage.errors import CorruptData, EnvironmentLacking, NotFound, UsageError
from moorage.store.format import newer
from moorage.store.keys import KEY_BYTES, StoreKey
from moorage.store.posix import PosixBackend

STORE_VERSION = 1
FOLDERS = ("keys", "tmp", "packs", "index", "condemned", "prunes", "pods", "checkpoints", "objects", "leases")


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``nonce`` (32 hex digits) tells this store from every other; ``key`` names the file in ``keys/``."""

    format: str = "moorage-store"
    version: int = STORE_VERSION
    nonce: str
    key: str
    created: float  # seconds since the epoch


class _Version(msgspec.Struct):
    format: str = ""
    version: int = 0


def backend_of(location: str) -> PosixBackend:
    """The storage that ``location`` names: ``/path`` or ``file:///path``. Raises `UsageError`, `EnvironmentLacking`."""
    if "://" in location:
        url = urlsplit(location)
        if url.scheme != "file":
            raise EnvironmentLacking(
                f"store {location}: this moorage has no {url.scheme} storage", "use a folder: /path or file:///path"
            )
        if url.netloc not in ("", "localhost"):
            raise UsageError(f"store {location}: a file URL names no host", "write file:///path")
        location = unquote(url.path)
    path = Path(location)
    if not path.is_absolute():
        raise UsageError(f"store {location}: not an absolute path", "write /path or file:///path")
    return PosixBackend(path)


def create(backend: PosixBackend) -> None:
    """Make an empty store unless there is one. When several hosts do it at once, the first configuration stands."""
    if backend.root.is_dir() and backend.stat("config") is None:
        foreign = sorted({entry.name for entry in backend.root.iterdir()} - set(FOLDERS))
        if foreign:
            raise UsageError(
                f"store {backend.location}: the folder is not a store and holds {foreign[0]}", "name an empty folder"
            )
    backend.make_folders(FOLDERS)
    if backend.stat("config") is not None:
        return
    key = StoreKey.random()
    # The key first: a configuration must never name a key that is not there. If another host wins the race below,
    # this key is left over and harmless.
    backend.put(f"keys/{key.id.hex()}", key.secret.hex().encode() + b"\n")
    config = StoreConfig(nonce=secrets.token_hex(16), key=key.id.hex(), created=time.time())
    backend.put("config", msgspec.json.format(msgspec.json.encode(config)) + b"\n")


def load(backend: PosixBackend) -> tuple[StoreConfig, StoreKey]:
    """Read configuration and key. Raises `NotFound`, `NewerVersion`, `CorruptData`, `EnvironmentLacking`."""
    try:
        data = backend.get("config")
    except NotFound:
        raise NotFound(
            f"{backend.location} is not a moorage store", "check the path; `moorage dev up` and the daemons create one"
        ) from None
    where = f"{backend.location}/config"
    try:
        head = msgspec.json.decode(data, type=_Version)
        if head.format != "moorage-store":
            raise CorruptData(f"{where} is not the configuration of a moorage store")
        if head.version > STORE_VERSION:
            raise newer(f"store {backend.location} has version {head.version}")
        config = msgspec.json.decode(data, type=StoreConfig)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{where}: {error}") from None
    return config, _key(backend, config)


def _key(backend: PosixBackend, config: StoreConfig) -> StoreKey:
    name = f"keys/{config.key}"
    try:
        secret = bytes.fromhex(backend.get(name).decode().strip())
    except NotFound:
        raise NotFound(f"{backend.location}/{name}, the store's key, is missing", "put it back from a copy") from None
    except ValueError:
        raise CorruptData(f"{backend.location}/{name} is not a key", "put it back from a copy") from None
    key = StoreKey(secret)
    if len(secret) != KEY_BYTES or key.id.hex() != config.key:
        raise CorruptData(f"{backend.location}/{name} holds another key", "put it back from a copy")
    return key
