"""A store in a bucket of a real S3 server, with and without everything that goes wrong on the way to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import CorruptData, EnvironmentLacking, MoorageError, NotFound, Unavailable, UsageError
from moorage.store import GlobalManifest, PodManifest, Store
from moorage.store.leases import FileLeases
from moorage.store_settings import StoreSettings
from tests.support.s3 import SECRET_KEY, FaultProxy, S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server) as proxy:
        yield proxy


@pytest.fixture
def location(server: S3Server) -> str:
    return f"s3://{server.bucket()}/stores/one"


@pytest.fixture
def store(server: S3Server, proxy: FaultProxy, location: str) -> Store:
    """Through the proxy."""
    return Store.open(location, create=True, settings=server.settings(proxy.endpoint))


def image(folder: Path, size: int = 300_000) -> Path:
    path = folder / f"image-{os.urandom(4).hex()}"
    path.write_bytes(os.urandom(size))
    return path


def save(store: Store, *paths: Path) -> str:
    """A checkpoint of one pod; returns the name of its global manifest."""
    with store.writer(label="test") as writer:
        images = {path.name: writer.add_file(path) for path in paths}
        writer.finish()
        pod = store.write_pod_manifest(
            PodManifest(job="j", owner="o", pod=0, incarnation=1, attempt=1, node="n", created=1.0, images=images)
        )
    return store.write_global_manifest(
        GlobalManifest(job="j", owner="o", attempt=1, incarnation=1, created=1.0, pods=[pod])
    )


def load(store: Store, name: str) -> dict[str, bytes]:
    pod = store.read_pod_manifest(store.read_global_manifest(name).pods[0])
    return {image: store.read_bytes(content) for image, content in pod.images.items()}


def test_what_is_written_is_read_by_another_process_and_deleted_by_prune(
    server: S3Server, location: str, tmp_path: Path
) -> None:
    settings = server.settings()
    store = Store.open(location, create=True, settings=settings)
    kept, dropped = image(tmp_path), image(tmp_path, 2_000_000)
    first, second = save(store, kept), save(store, dropped)
    other = Store.open(location, settings=settings)
    assert other.nonce == store.nonce
    assert load(other, first) == {kept.name: kept.read_bytes()}
    assert other.check(second, read_data=True).ok
    assert other.prune([first], generation=1, protect_after=2e9).packs_condemned == 1
    assert other.prune([first], generation=2, protect_after=2e9).packs_deleted == 1
    with pytest.raises(NotFound):
        other.read_global_manifest(second)
    assert load(Store.open(location, settings=settings), first) == {kept.name: kept.read_bytes()}
    bucket = location.split("/")[2]
    assert sum("/packs/" in name for name in server.names(bucket)) == 1
    assert not any("/leases/" in name or "/tmp/" in name for name in server.names(bucket))


def test_conditions_decide_between_two_who_write_the_same_name(store: Store, server: S3Server) -> None:
    assert store.backend.put("objects/a", b"1")
    assert not store.backend.put("objects/a", b"2")
    assert store.backend.get("objects/a") == b"1"
    assert store.backend.touch("objects/a")
    assert not store.backend.touch("objects/b")
    assert not store.backend.delete("objects/b")
    assert abs(store.backend.now() - (found.modified if (found := store.backend.stat("objects/a")) else 0)) < 60
    settings = server.settings()
    assert Store.open(store.location, create=True, settings=settings).nonce == store.nonce


def test_a_lease_that_was_removed_is_not_revived(store: Store) -> None:
    leases = FileLeases(store.backend)
    lease = leases.acquire("write", "w")
    assert [info.id for info in leases.active()] == [lease.info.id]
    store.backend.delete(f"leases/{lease.info.id}")
    assert not store.backend.touch(f"leases/{lease.info.id}")
    lease.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("500", {"times": 3}),
        ("503", {"times": 3}),
        ("slow", {"times": 4, "seconds": 0.2}),
        ("hang", {"times": 1}),
        ("partial", {"method": "GET", "path": "/packs/", "times": 2}),
        ("lost", {"method": "PUT", "times": 2}),
        ("lost", {"method": "POST", "path": "delete", "times": 1}),
    ],
)
def test_a_fault_that_ends_is_ridden_out(
    store: Store, proxy: FaultProxy, tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    path = image(tmp_path)
    with proxy.fault(kind, **options) as fault:
        assert load(store, save(store, path)) == {path.name: path.read_bytes()}
    assert fault.met == options["times"]


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        ("500", {}, Unavailable, "InternalError"),
        ("503", {}, Unavailable, "SlowDown"),
        ("hang", {}, Unavailable, "packs|leases|timed"),
        ("lost", {"method": "PUT", "path": "/packs/"}, Unavailable, "packs"),
        ("expired", {}, EnvironmentLacking, "expired"),
        ("denied", {}, EnvironmentLacking, "refused"),
    ],
)
def test_a_fault_that_stays_ends_in_a_clear_error_and_leaves_nothing_visible(
    store: Store,
    server: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    kind: str,
    options: dict[str, object],
    error: type[MoorageError],
    words: str,
) -> None:
    impatient = Store.open(
        store.location, settings=server.settings(proxy.endpoint, request_seconds=0.5, retry_seconds=1.0)
    )
    with proxy.fault(kind, **options), pytest.raises(error, match=words) as raised:
        save(impatient, image(tmp_path))
    assert "\n" not in raised.value.message and len(raised.value.message) < 300
    assert SECRET_KEY not in str(raised.value)
    bucket = store.location.split("/")[2]
    assert not any("/pods/" in name or "/index/" in name for name in server.names(bucket))
    save(impatient, image(tmp_path))  # as if nothing had been


def test_wrong_bytes_are_never_taken_for_the_right_ones(store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    path = image(tmp_path)
    name = save(store, path)
    with proxy.fault("corrupt", method="GET", path="/packs/"), pytest.raises(CorruptData, match="pack"):
        load(store, name)
    with proxy.fault("corrupt", method="GET", path="/checkpoints/"), pytest.raises(CorruptData):
        store.anew().read_global_manifest(name)
    with proxy.fault("partial", method="GET", path="/packs/"), pytest.raises(Unavailable):
        load(_impatient(store, proxy), name)
    assert load(store, name) == {path.name: path.read_bytes()}


def _impatient(store: Store, proxy: FaultProxy) -> Store:
    store = store.anew()
    store.backend._patience = 0.5  # type: ignore[attr-defined]
    return store


def test_a_bucket_that_is_gone_is_named(server: S3Server, proxy: FaultProxy, location: str, tmp_path: Path) -> None:
    store = Store.open(location, create=True, settings=server.settings())
    bucket = location.split("/")[2]
    server.remove(bucket)
    with pytest.raises(NotFound, match=f"bucket {bucket}"):
        save(store, image(tmp_path))
    for create in (False, True):
        with pytest.raises(NotFound, match=f"bucket {bucket}"):
            Store.open(location, create=create, settings=server.settings())


def test_renewed_credentials_are_used_without_a_restart(
    server: S3Server, proxy: FaultProxy, location: str, tmp_path: Path
) -> None:
    from moorage.store.s3_access import credential_provider

    provide = credential_provider(server.settings())
    assert provide()["token"] is None
    server.write_credentials(token="fresh")
    try:
        assert provide()["token"] == "fresh"
    finally:
        server.write_credentials()


def test_a_server_that_minds_no_conditions_is_refused(server: S3Server, proxy: FaultProxy, location: str) -> None:
    with proxy.fault("unconditional"), pytest.raises(EnvironmentLacking, match="overwrites"):
        Store.open(location, create=True, settings=server.settings(proxy.endpoint))


@pytest.mark.parametrize("wrong", ["s3://", "s3:///x", "s3://UPPER/x", "s3://bucket/../x", "s3://bucket/a//b"])
def test_a_location_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="not the location of a bucket"):
        Store.open(wrong)


def test_credentials_that_cannot_be_read_are_told_without_their_content(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\nnonsense hush-hush\n")
    for settings in (
        StoreSettings(credentials_file=str(file), endpoint="http://127.0.0.1:1"),
        StoreSettings(credentials_file=str(tmp_path / "none")),
    ):
        with pytest.raises(EnvironmentLacking) as raised:
            Store.open("s3://bucket/x", settings=settings)
        assert "hush" not in str(raised.value)
