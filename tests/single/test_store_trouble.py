"""The store on a real file system: damage, full disks, lost leases."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moorage.cli.store import rebuild_index
from moorage.errors import (
    CorruptData,
    EnvironmentLacking,
    MoorageError,
    NewerVersion,
    NoCapacity,
    NotFound,
    Unavailable,
)
from moorage.store import GlobalManifest, Store, leases
from moorage.store.backend import Data
from moorage.store.posix import PosixSink
from tests.support.store_files import MIB, all_files, alter, checkpoint, images, noise, packs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """3 MiB of noise, 2 MiB of zeros, text, and an odd end."""
    path = tmp_path / "pages-1.img"
    path.write_bytes(noise(3 * MIB, 1) + bytes(2 * MIB) + b"all work and no play " * 100_000 + noise(12345, 2))
    return path


def test_an_altered_chunk_is_named_and_the_rest_is_read(store: Store, image: Path, tmp_path: Path) -> None:
    name = checkpoint(store, [image])
    alter(packs(store)[0], 64 + 80 + 1000)
    with pytest.raises(CorruptData, match=r"chunk [0-9a-f]{64} in pack [0-9a-f]{32}.*digest") as caught:
        store.read_file(images(store, name)[image.name], tmp_path / "back")
    assert "earlier checkpoint" in caught.value.hint
    assert not (tmp_path / "back").exists()
    assert store.check(name, read_data=False).ok
    seen: list[tuple[int, int]] = []
    result = store.check(name, read_data=True, progress=lambda done, total: seen.append((done, total)))
    assert len(result.problems) == 1 and "digest" in result.problems[0]
    assert seen[-1][0] == seen[-1][1] == result.bytes


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: alter(path, 70), "header|format|digest|chunk"),
        (lambda path: alter(path, 0), "does not begin like a pack"),
        (lambda path: alter(path, 45), "says that it is pack"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "cut short"),
        (lambda path: path.unlink(), "missing"),
    ],
)
def test_a_damaged_pack_is_found(store: Store, image: Path, damage: Callable[[Path], None], match: str) -> None:
    name = checkpoint(store, [image])
    damage(packs(store)[0])
    with pytest.raises((CorruptData, NewerVersion), match=match):
        store.read_bytes(images(store, name)[image.name])
    assert not Store.open(store.location).check(name, read_data=True).ok


def test_a_pack_in_the_place_of_another_is_found(store: Store, tmp_path: Path) -> None:
    names = []
    for seed in (1, 2):
        path = tmp_path / str(seed)
        path.write_bytes(noise(MIB, seed))
        names.append(checkpoint(store, [path], attempt=seed))
    first, second = packs(store)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    for name in names:
        problems = store.check(name, read_data=True).problems
        assert any("says that it is pack" in problem for problem in problems)


@pytest.mark.parametrize("folder", ["pods", "checkpoints"])
def test_an_altered_or_missing_manifest_is_named(store: Store, image: Path, folder: str) -> None:
    name = checkpoint(store, [image])
    path = next(Path(store.location, folder).iterdir())
    alter(path, 200)
    with pytest.raises(CorruptData, match=path.name):
        images(store, name)
    path.unlink()
    with pytest.raises(NotFound, match=path.name):
        images(store, name)


def test_a_damaged_index_costs_only_what_it_named(store: Store, image: Path, tmp_path: Path) -> None:
    checkpoint(store, [image])
    path = next(Path(store.location, "index").iterdir())
    other = tmp_path / "other"
    other.write_bytes(noise(MIB, 9))
    name = checkpoint(store, [other], attempt=2)
    alter(path, 300)
    fresh = Store.open(store.location)
    assert fresh.read_bytes(images(fresh, name)["other"]) == other.read_bytes()
    assert path.name in fresh.check(name, read_data=False).problems[0]
    with pytest.raises(CorruptData, match=path.name) as caught:
        fresh.prune([name], generation=1, protect_after=time.time() + 60)
    assert "nothing was deleted" in caught.value.hint


@pytest.mark.parametrize("damage", [lambda path: alter(path, 300), Path.unlink], ids=["altered", "deleted"])
def test_a_check_sees_what_happened_to_an_index_since_it_was_read(
    store: Store, image: Path, damage: Callable[[Path], None]
) -> None:
    name = checkpoint(store, [image])
    assert store.check(name, read_data=True).ok
    damage(next(Path(store.location, "index").iterdir()))
    assert not store.check(name, read_data=False).ok


def test_a_pack_that_vanished_is_not_referred_to_again(store: Store, image: Path, tmp_path: Path) -> None:
    first = checkpoint(store, [image])
    (lost,) = packs(store)
    kept = tmp_path / "kept"
    lost.rename(kept)
    second = checkpoint(store, [image])
    assert store.check(second, read_data=True).ok
    with store.writer(label="asks") as writer:
        assert writer.lacking(images(store, second).values()) == 0
    for path in packs(store):
        path.unlink()
    with store.writer(label="asks") as writer:
        assert writer.lacking(images(store, second).values()) > 0
    kept.rename(lost)  # somebody puts it back
    store.index.refresh()
    assert store.check(first, read_data=True).ok
    store.read_file(images(store, first)[image.name], tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == image.read_bytes()


def test_an_index_that_is_lost_or_damaged_is_rebuilt_from_the_packs(
    store: Store, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = checkpoint(store, [image])
    (tmp_path / "more").write_bytes(noise(MIB, 3))
    other = checkpoint(store, [tmp_path / "more"])
    first, second = (Path(store.location, entry.name) for entry in store.backend.list("index"))
    count = len(packs(store))
    alter(first, 100)
    second.unlink()
    torn = packs(store)[0].with_name("f" * 32)
    torn.write_bytes(packs(store)[0].read_bytes()[:5000])
    assert not store.check(name, read_data=False).ok
    rebuilt = Store.open(store.location).rebuild_index()
    assert (rebuilt.packs, rebuilt.removed) == (count, 1) and not first.exists()
    assert len(rebuilt.problems) == 1 and "says that it is pack" in rebuilt.problems[0]
    for checkpoint_ in (name, other):
        assert store.check(checkpoint_, read_data=True).ok
    config = tmp_path / "worker.toml"
    config.write_text(f'store = "{store.location}"\n')
    rebuild_index(config, output="json")
    assert json.loads(capsys.readouterr().out)["packs"] == 0


def test_a_manifest_without_its_pods_cannot_be_written(store: Store) -> None:
    with pytest.raises(NotFound, match="pod manifest"):
        store.write_global_manifest(
            GlobalManifest(job="j", owner="o", attempt=1, incarnation=1, created=2.0, pods=["ab" * 32])
        )


def test_a_full_disk_leaves_nothing_half_done(
    store: Store, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = checkpoint(store, [image])
    before = all_files(store)
    written = 0
    write = PosixSink.write

    def fill(sink: PosixSink, buffers: Sequence[Data]) -> None:
        nonlocal written
        written += sum(map(len, buffers))
        if written > 2 * MIB:
            write(sink, buffers[:1])
            raise NoCapacity("the disk is full", "free space")
        write(sink, buffers)

    big = tmp_path / "big"
    big.write_bytes(noise(40 * MIB, 3))
    monkeypatch.setattr(PosixSink, "write", fill)
    with pytest.raises(NoCapacity), store.writer(label="a", threads=2) as writer:
        writer.add_file(big)
    assert all_files(store) == before
    assert store.check(name, read_data=True).ok


@pytest.mark.root
def test_a_real_full_file_system_is_no_capacity(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    assert os.system(f"mount -t tmpfs -o size=4m tmpfs {mount}") == 0
    try:
        store = Store.open(str(mount / "store"), create=True)
        big = tmp_path / "big"
        big.write_bytes(noise(8 * MIB, 3))
        assert store.free_bytes() <= 4 * MIB
        before = all_files(store)
        with pytest.raises(NoCapacity, match="No space left") as caught, store.writer(label="a") as writer:
            writer.add_file(big)
        assert "moorage prune" in caught.value.hint
        assert all_files(store) == before
    finally:
        assert os.system(f"umount {mount}") == 0


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EDQUOT, NoCapacity),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
        (errno.EROFS, EnvironmentLacking),
    ],
)
def test_trouble_of_the_file_system_says_what_it_is(
    store: Store, image: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[MoorageError]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with pytest.raises(expected, match=os.strerror(number)), store.writer(label="a") as writer:
        writer.add_file(image)
        monkeypatch.setattr(os, "fsync", fail)
        writer.finish()
    monkeypatch.undo()
    assert not packs(store)


def test_an_aborted_writer_leaves_nothing(store: Store, image: Path) -> None:
    before = all_files(store)
    with store.writer(label="a") as writer:
        writer.add_file(image)
    assert all_files(store) == before
    with pytest.raises(MoorageError, match="closed"):
        writer.add_file(image)


def test_a_writer_that_failed_cannot_be_finished(store: Store, image: Path, tmp_path: Path) -> None:
    with store.writer(label="a") as writer:
        writer.add_file(image)
        with pytest.raises(NotFound, match="no-such-file"):
            writer.add_file(tmp_path / "no-such-file")
        writer.add_file(image)  # a missing file alone does no harm
        writer.finish()
        with pytest.raises(MoorageError, match="finished"):
            writer.add_file(image)


def test_a_link_is_not_followed(store: Store, image: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(image)
    with store.writer(label="a") as writer, pytest.raises(MoorageError):
        writer.add_file(tmp_path / "link")


def test_a_lost_lease_stops_the_writer(store: Store, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="lease"), store.writer(label="pod 7") as writer:
        writer.add_file(image)
        monkeypatch.setattr(leases, "_clock", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + 50)
        writer.finish()
    assert not packs(store)


def test_leases_are_renewed_and_expire(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.05)
    with store.writer(label="a") as writer:
        path = Path(store.location, "leases", writer.lease_id)
        assert [info.label for info in store.leases.active()] == ["a"]
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 20
        while path.stat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        monkeypatch.setattr(leases, "TTL_SECONDS", -1.0)
        assert store.leases.active() == []
    assert not path.exists()


def test_a_lease_that_was_taken_away_is_not_revived(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.02)
    monkeypatch.setattr(leases, "_TRUST_SECONDS", 0.2)
    with store.writer(label="a") as writer:
        Path(store.location, "leases", writer.lease_id).unlink()
        deadline = time.monotonic() + 20
        while writer.lease_valid():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(Unavailable):
            writer.finish()
