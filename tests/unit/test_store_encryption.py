"""Encryption at rest: what can be read with which key, and what shows without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moorage import store_settings
from moorage.errors import CorruptData, EnvironmentLacking, MoorageError, NotFound, UsageError
from moorage.store import GlobalManifest, PodManifest, Store, config, sealing
from moorage.store.posix import PosixBackend
from moorage.store_settings import StoreSettings, key_of_file, wrapping_key

MARKER = b"the-marker-that-must-not-be-seen"


def key_file(folder: Path, name: str = "key") -> Path:
    path = folder / name
    path.write_text(os.urandom(32).hex() + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(key_file=str(key_file(tmp_path)))


@pytest.fixture
def store(tmp_path: Path, settings: StoreSettings) -> Store:
    return Store.open(str(tmp_path / "store"), create=True, settings=settings)


def save(store: Store, data: bytes, label: str = "a label") -> str:
    with store.writer(label=label) as writer:
        content = writer.add_bytes(data)
        writer.finish()
        pod = store.write_pod_manifest(
            PodManifest(
                job=MARKER.decode(),
                owner="o",
                pod=0,
                incarnation=1,
                attempt=1,
                node="n",
                created=1.0,
                images={"pages": content},
            )
        )
    store.put_object("logs/x", MARKER * 3)
    return store.write_global_manifest(
        GlobalManifest(job=MARKER.decode(), owner="o", attempt=1, incarnation=1, created=1.0, pods=[pod])
    )


def load(store: Store, name: str) -> bytes:
    return store.read_bytes(store.read_pod_manifest(store.read_global_manifest(name).pods[0]).images["pages"])


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_of_the_content_shows_and_equal_data_is_stored_once(
    tmp_path: Path, store: Store, settings: StoreSettings
) -> None:
    data = (MARKER + os.urandom(1000)) * 500
    lease = store.leases.acquire("read", MARKER.decode())
    name = save(store, data)
    before = everything(tmp_path / "store")
    assert not any(MARKER in data for data in before.values())
    assert not any(store.key.secret in data or store.key.secret.hex().encode() in data for data in before.values())
    lease.close()
    other = Store.open(store.location, settings=settings)
    assert load(other, name) == data
    assert other.get_object("logs/x") == MARKER * 3
    with other.writer(label="again") as writer:
        writer.add_bytes(data)
        assert writer.finish().bytes_new == 0
    assert other.check(name, read_data=True).ok


def test_prune_moves_encrypted_chunks_as_they_are(tmp_path: Path, store: Store, settings: StoreSettings) -> None:
    small = save(store, os.urandom(100_000))
    with store.writer(label="w") as writer:
        kept = writer.add_bytes(data := os.urandom(100_000))
        writer.add_bytes(os.urandom(2_000_000))
        writer.finish()
        pod = store.write_pod_manifest(
            PodManifest(
                job="j", owner="o", pod=0, incarnation=1, attempt=2, node="n", created=1.0, images={"pages": kept}
            )
        )
    name = store.write_global_manifest(
        GlobalManifest(job="j", owner="o", attempt=2, incarnation=1, created=1.0, pods=[pod])
    )
    assert store.prune([name, small], generation=1, protect_after=2e9).bytes_copied > 100_000
    assert store.prune([name, small], generation=2, protect_after=2e9).packs_deleted
    assert load(Store.open(store.location, settings=settings), name) == data


@pytest.mark.parametrize("where", ["packs", "index", "pods", "checkpoints", "objects"])
def test_every_bit_is_authenticated(tmp_path: Path, store: Store, settings: StoreSettings, where: str) -> None:
    name = save(store, os.urandom(5000))
    path = next(path for path in everything(tmp_path / "store") if where in path.parts)
    sound = path.read_bytes()
    for at in (len(sound) - 1, len(sound) // 2, 90 if where != "packs" else 64 + 20):
        damaged = bytearray(sound)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(MoorageError) as raised:
            fresh = Store.open(store.location, settings=settings)
            load(fresh, name)
            fresh.get_object("logs/x")
        assert isinstance(raised.value, CorruptData)
    path.write_bytes(sound)


def test_an_object_opens_under_its_own_name_alone(tmp_path: Path, store: Store) -> None:
    store.put_object("logs/a", b"of a")
    store.put_object("logs/b", b"of b")
    folder = tmp_path / "store" / "objects" / "logs"
    (folder / "a").write_bytes((folder / "b").read_bytes())
    with pytest.raises(CorruptData):
        store.get_object("logs/a")


def test_without_the_right_key_nothing_opens(tmp_path: Path, store: Store, settings: StoreSettings) -> None:
    with pytest.raises(EnvironmentLacking, match="no key is given"):
        Store.open(store.location)
    with pytest.raises(EnvironmentLacking, match="not the one that opens"):
        Store.open(store.location, settings=StoreSettings(key_file=str(key_file(tmp_path, "other"))))
    plain = Store.open(str(tmp_path / "plain"), create=True)
    with pytest.raises(EnvironmentLacking, match="not encrypted"):
        Store.open(plain.location, settings=settings)
    for path in (tmp_path / "store" / "keys").iterdir():
        path.unlink()
    with pytest.raises(NotFound, match="key, is missing"):
        Store.open(store.location, settings=settings)


def test_an_encrypted_store_takes_no_plain_chunk(tmp_path: Path, store: Store, settings: StoreSettings) -> None:
    """Somebody who can write into the bucket must not be able to slip in what was never encrypted."""
    plain = Store.open(str(tmp_path / "plain"), create=True)
    save(plain, b"x" * 5000)
    name = save(store, b"y" * 5000)
    pod = store.read_global_manifest(name).pods[0]
    foreign = next((tmp_path / "plain" / "pods").iterdir())
    (tmp_path / "store" / "pods" / pod).write_bytes(foreign.read_bytes())
    with pytest.raises(CorruptData, match="not encrypted"):
        store.read_pod_manifest(pod)


def test_rotation_rewrites_no_data_and_shuts_the_old_key_out(
    tmp_path: Path, store: Store, settings: StoreSettings
) -> None:
    name = save(store, data := os.urandom(5000))
    new = StoreSettings(key_file=str(key_file(tmp_path, "new")))
    old_key, new_key = wrapping_key(settings), wrapping_key(new)
    assert old_key and new_key
    folder = tmp_path / "store"
    before = {path: data for path, data in everything(folder).items() if "keys" not in path.parts}
    backend = PosixBackend(folder)
    with pytest.raises(EnvironmentLacking):
        config.rotate(backend, os.urandom(32), new_key)
    assert len(config.rotate(backend, old_key, new_key)) == 1
    assert config.rotate(backend, old_key, new_key) == []  # once more, after an interruption
    assert {path: data for path, data in everything(folder).items() if "keys" not in path.parts} == before
    assert load(Store.open(store.location, settings=new), name) == data
    with pytest.raises(EnvironmentLacking, match="after a rotation"):
        Store.open(store.location, settings=settings)


def test_keys_come_from_a_file_a_command_or_the_environment(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    key = key_of_file(path)
    assert wrapping_key(StoreSettings(), {}) is None
    assert wrapping_key(StoreSettings(), {"MOORAGE_KEY": key.hex()}) == key
    assert wrapping_key(StoreSettings(key_command=["cat", str(path)]), {}) == key
    raw = tmp_path / "raw"
    raw.write_bytes(key)
    raw.chmod(0o600)
    assert key_of_file(raw) == key
    raw.chmod(0o644)
    with pytest.raises(EnvironmentLacking, match="can be read by others"):
        key_of_file(raw)
    with pytest.raises(NotFound):
        key_of_file(tmp_path / "none")
    with pytest.raises(EnvironmentLacking, match="ended with 1"):
        wrapping_key(StoreSettings(key_command=["false"]), {})
    with pytest.raises(UsageError) as raised:
        wrapping_key(StoreSettings(), {"MOORAGE_KEY": "hush"})
    assert "hush" not in str(raised.value)
    with pytest.raises(EnvironmentLacking):
        wrapping_key(StoreSettings(key_command=["/no/such/command"]), {})
    assert len(key) == store_settings.WRAPPING_KEY_BYTES


def test_a_wrapped_key_is_bound_to_its_store() -> None:
    key, secret = os.urandom(32), os.urandom(32)
    wrapped = sealing.wrap(key, secret, "one")
    assert sealing.unwrap(key, wrapped, "one", "here") == secret
    with pytest.raises(EnvironmentLacking):
        sealing.unwrap(key, wrapped, "two", "here")
    with pytest.raises(CorruptData):
        sealing.unwrap(key, b"{}", "one", "here")
