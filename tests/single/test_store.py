"""The store on a real file system: what comes back, what trouble looks like, what a killed process leaves."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from moorage.errors import (
    Conflict,
    CorruptData,
    EnvironmentLacking,
    Fenced,
    MoorageError,
    NewerVersion,
    NoCapacity,
    NotFound,
    Unavailable,
    UsageError,
)
from moorage.store import Content, GlobalManifest, PodManifest, Store, leases
from moorage.store.backend import Data
from moorage.store.posix import PosixSink

MIB = 1 << 20


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


# What a child process begins with: ``checkpoint(attempt)`` writes the file that it was given.
CHILD = """
import sys
from pathlib import Path
from moorage.store import GlobalManifest, PodManifest, Store

store = Store.open(sys.argv[1])

def checkpoint(attempt):
    facts = dict(job="j", owner="o", attempt=attempt, incarnation=1, created=1.0)
    with store.writer(label="child") as writer:
        content = writer.add_file(Path(sys.argv[2]))
        writer.finish()
        pod = store.write_pod_manifest(PodManifest(pod=0, node=sys.argv[2], images={"a": content}, **facts))
    return store.write_global_manifest(GlobalManifest(pods=[pod], **facts))
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """3 MiB of noise, 2 MiB of zeros, text, and an odd end."""
    path = tmp_path / "pages-1.img"
    path.write_bytes(noise(3 * MIB, 1) + bytes(2 * MIB) + b"all work and no play " * 100_000 + noise(12345, 2))
    return path


def pod(images: dict[str, Content], attempt: int = 1) -> PodManifest:
    return PodManifest(job="j", owner="o", pod=0, incarnation=1, attempt=attempt, node="n", created=1.0, images=images)


def checkpoint(store: Store, files: Sequence[Path], attempt: int = 1) -> str:
    """Write a whole checkpoint; returns the global manifest's name."""
    with store.writer(label="test") as writer:
        images = {path.name: writer.add_file(path) for path in files}
        writer.finish()
        name = store.write_pod_manifest(pod(images, attempt))
    return store.write_global_manifest(
        GlobalManifest(job="j", owner="o", attempt=attempt, incarnation=1, created=2.0, pods=[name])
    )


def images(store: Store, name: str) -> dict[str, Content]:
    return store.read_pod_manifest(store.read_global_manifest(name).pods[0]).images


def packs(store: Store) -> list[Path]:
    return sorted(Path(store.location, "packs").iterdir())


def alter(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def all_files(store: Store) -> list[str]:
    return sorted(str(p.relative_to(store.location)) for p in Path(store.location).rglob("*") if p.is_file())


# What comes back


@pytest.mark.parametrize("threads", [1, 3])
def test_files_come_back_and_nothing_is_stored_twice(store: Store, image: Path, tmp_path: Path, threads: int) -> None:
    big = tmp_path / "big"
    big.write_bytes(noise(40 * MIB, 3))  # several stripes and packs
    with store.writer(label="a", threads=threads) as writer:
        contents = [writer.add_file(path) for path in (image, big)]
        first = writer.finish()
    with store.writer(label="b", threads=threads) as writer:
        again = [writer.add_file(path) for path in (image, big)]
        second = writer.finish()
    assert again == contents
    assert first.bytes_total == image.stat().st_size + big.stat().st_size
    assert second.bytes_new == second.chunks_new == second.bytes_stored == 0
    targets = [tmp_path / "x", tmp_path / "y"]
    store.read_files(list(zip(contents, targets, strict=True)), threads=threads)
    assert [t.read_bytes() for t in targets] == [image.read_bytes(), big.read_bytes()]
    assert store.read_bytes(contents[0]) == image.read_bytes()
    assert stat.S_IMODE(targets[0].stat().st_mode) == 0o600


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65536, MIB, MIB + 1])
def test_every_size_comes_back(store: Store, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise(size, size))
    with store.writer(label="a") as writer:
        from_file, from_bytes = writer.add_file(path), writer.add_bytes(path.read_bytes())
        writer.finish()
    assert store.read_bytes(from_file) == store.read_bytes(from_bytes) == path.read_bytes()
    store.read_file(from_file, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_holes_and_zeros_take_no_space_and_become_holes(store: Store, tmp_path: Path) -> None:
    sparse, zeros = tmp_path / "sparse", tmp_path / "zeros"
    with sparse.open("wb") as file:
        file.truncate(3 << 30)
        file.seek((1 << 30) + 100)
        file.write(b"here")
    zeros.write_bytes(bytes(8 * MIB))
    with store.writer(label="a") as writer:
        contents = [writer.add_file(path) for path in (sparse, zeros)]
        stats = writer.finish()
    assert stats.bytes_stored < 10_000
    store.read_files([(contents[0], tmp_path / "x"), (contents[1], tmp_path / "y")])
    assert (tmp_path / "x").stat().st_size == 3 << 30
    assert (tmp_path / "x").stat().st_blocks * 512 < MIB
    with (tmp_path / "x").open("rb") as file:
        file.seek((1 << 30) + 100)
        assert file.read(6) == b"here\0\0"
    assert (tmp_path / "y").read_bytes() == bytes(8 * MIB)


def test_a_target_that_held_other_data_is_replaced(store: Store, image: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(noise(20 * MIB, 7))
    with store.writer(label="a") as writer:
        content = writer.add_file(image)
        writer.finish()
    fd = os.open(target, os.O_RDWR)
    try:
        os.ftruncate(fd, 0)
        store.read_file(content, fd)
    finally:
        os.close(fd)
    assert target.read_bytes() == image.read_bytes()


def test_pages_that_moved_and_pages_that_changed_cost_only_themselves(store: Store, tmp_path: Path) -> None:
    before = noise(16 * MIB, 4)
    moved = noise(4096 * 3, 5) + before
    changed = bytearray(moved)
    for page in range(50, 4000, 100):
        changed[page * 4096 : page * 4096 + 10] = b"0123456789"
    stats = []
    for number, data in enumerate([before, moved, bytes(changed), bytes(changed)]):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with store.writer(label="a") as writer:
            content = writer.add_file(path)
            stats.append(writer.finish())
        assert store.read_bytes(content) == data
        store.read_file(content, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data
    assert stats[1].bytes_new < 3 * MIB  # by hand: the first chunk or two
    assert stats[2].bytes_new < 2.5 * 40 * 4096  # 40 pages changed; a few chunks may be cut anew
    assert stats[3].bytes_new == 0


def test_two_processes_of_one_parent_share_all_but_what_they_touched(store: Store, tmp_path: Path) -> None:
    parent = noise(8 * MIB, 6)
    child = bytearray(parent)
    for page in range(0, 2048, 64):
        child[page * 4096 + 8 : page * 4096 + 16] = b"refcount"
    (tmp_path / "pages-1.img").write_bytes(parent)
    (tmp_path / "pages-2.img").write_bytes(child)
    with store.writer(label="a") as writer:
        contents = [writer.add_file(tmp_path / f"pages-{i}.img") for i in (1, 2)]
        stats = writer.finish()
    assert stats.bytes_new < 10 * MIB
    assert [store.read_bytes(c) for c in contents] == [parent, bytes(child)]


def test_text_is_compressed_when_the_store_is_slow(store: Store, image: Path) -> None:
    store.write_rate.value = 20e6
    name = checkpoint(store, [image])
    assert store.usage(name)["images"].stored < 3.6 * MIB
    assert store.read_bytes(images(store, name)[image.name]) == image.read_bytes()
    assert store.check(name, read_data=True).ok


def test_totals_are_kept_by_kind(store: Store, image: Path) -> None:
    with store.writer(label="a") as writer:
        writer.add_file(image, kind="images")
        writer.add_bytes(b"tree", kind="layer")
        writer.finish()
        assert writer.by_kind["layer"].total == 4
        assert writer.by_kind["images"].total == image.stat().st_size
        assert 3 * MIB < writer.by_kind["images"].new < 4 * MIB + 3 * MIB


def test_blobs_have_names_and_are_never_overwritten(store: Store) -> None:
    store.put_object("logs/j/0.log", b"line\n")
    store.put_object("logs/j/0.log", b"line\n")
    with pytest.raises(Conflict, match="exists already"):
        store.put_object("logs/j/0.log", b"other\n")
    assert store.get_object("logs/j/0.log") == b"line\n"
    assert store.list_objects("logs/") == ["logs/j/0.log"]
    assert store.delete_object("logs/j/0.log") and not store.delete_object("logs/j/0.log")
    with pytest.raises(NotFound):
        store.get_object("logs/j/0.log")
    for name in ("../config", "/etc/passwd", "a//b", "", ".hidden"):
        with pytest.raises(UsageError):
            store.put_object(name, b"")


def test_everything_is_private(store: Store, image: Path) -> None:
    checkpoint(store, [image])
    store.put_object("logs/a/b", b"")
    for path in [Path(store.location), *Path(store.location).rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# Opening


def test_all_hosts_see_one_store(store: Store, image: Path) -> None:
    other = Store.open("file://" + store.location)
    assert other.nonce == store.nonce and len(store.nonce) == 32
    name = checkpoint(store, [image])
    assert other.read_bytes(images(other, name)[image.name]) == image.read_bytes()
    with other.writer(label="b") as writer:
        writer.add_file(image)
        assert writer.finish().bytes_new == 0


def test_hosts_that_create_it_at_once_agree(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "store")
    code = "import sys; from moorage.store import Store; print(Store.open(sys.argv[1], create=True).nonce)"
    processes = [child(code, path) for _ in range(3)]
    assert {process.communicate()[0].strip() for process in processes} == {Store.open(path).nonce}


@pytest.mark.parametrize(
    ("location", "error", "match"),
    [
        ("/nonexistent/store", NotFound, "not a moorage store"),
        ("relative/path", UsageError, "not an absolute path"),
        ("s3://bucket/x", EnvironmentLacking, "no s3 storage"),
        ("file://host/x", UsageError, "names no host"),
    ],
)
def test_a_wrong_location_is_told_in_one_line(location: str, error: type[MoorageError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        Store.open(location)
    assert caught.value.hint


def test_a_folder_with_other_things_is_not_made_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        Store.open(str(tmp_path), create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def _rewrite(store: Store, change: Callable[[dict[str, object]], None]) -> None:
    path = Path(store.location, "config")
    config = msgspec.json.decode(path.read_bytes())
    change(config)
    path.write_bytes(msgspec.json.encode(config))


def test_a_store_of_a_later_release_is_refused(store: Store) -> None:
    _rewrite(store, lambda config: config.update(version=2))
    with pytest.raises(NewerVersion, match="version 2") as caught:
        Store.open(store.location)
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"{}", b"{", b'{"format": "moorage-store", "version": 1}'])
def test_a_damaged_configuration_is_corrupt_data(store: Store, data: bytes) -> None:
    Path(store.location, "config").write_bytes(data)
    with pytest.raises(CorruptData, match="config"):
        Store.open(store.location)


def test_a_missing_or_wrong_key_is_named(store: Store) -> None:
    key = next(Path(store.location, "keys").iterdir())
    key.write_text("00" * 32)
    with pytest.raises(CorruptData, match="another key"):
        Store.open(store.location)
    key.unlink()
    with pytest.raises(NotFound, match="key"):
        Store.open(store.location)


# Damage


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


def test_a_manifest_without_its_pods_cannot_be_written(store: Store) -> None:
    with pytest.raises(NotFound, match="pod manifest"):
        store.write_global_manifest(
            GlobalManifest(job="j", owner="o", attempt=1, incarnation=1, created=2.0, pods=["ab" * 32])
        )


# Writers in trouble


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


# Prune


def future() -> float:
    return time.time() + 60


def test_prune_frees_in_two_calls_and_keeps_what_is_kept(store: Store, image: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(noise(2 * MIB, 8))
    first, second = checkpoint(store, [image], 1), checkpoint(store, [other], 2)
    assert store.prune([first, second], generation=1, protect_after=future()).packs_condemned == 0
    planned = store.prune([first], generation=2, protect_after=future(), dry_run=True)
    done = store.prune([first], generation=2, protect_after=future())
    assert planned == done
    assert done.packs_condemned == 1 and done.bytes_freed == 0
    freed = store.prune([first], generation=3, protect_after=future())
    assert freed.bytes_freed > 2 * MIB and freed.manifests_deleted == 2
    assert store.check(first, read_data=True).ok
    with pytest.raises(NotFound):
        store.read_global_manifest(second)


def test_packs_that_are_mostly_garbage_are_copied(store: Store, tmp_path: Path) -> None:
    files = []
    for seed in range(4):
        files.append(tmp_path / str(seed))
        files[-1].write_bytes(noise(MIB, seed))
    checkpoint(store, files, 1)
    kept = checkpoint(store, files[:1], 2)
    assert 0 < store.prune([kept], generation=1, protect_after=future()).bytes_copied < 1.1 * MIB
    assert store.prune([kept], generation=2, protect_after=future()).bytes_freed > 4 * MIB
    assert store.check(kept, read_data=True).ok
    assert sum(path.stat().st_size for path in packs(store)) < 1.1 * MIB


def test_young_data_is_left_alone(store: Store, image: Path) -> None:
    name = checkpoint(store, [image])
    for generation in (1, 2, 3):
        store.prune([], generation=generation, protect_after=time.time() - 3600)
    assert store.check(name, read_data=True).ok


def test_a_used_generation_and_a_missing_checkpoint_are_refused(store: Store, image: Path) -> None:
    name = checkpoint(store, [image])
    store.prune([name], generation=5, protect_after=future())
    for generation in (5, 4):
        with pytest.raises(Fenced, match="used already"):
            store.prune([name], generation=generation, protect_after=future())
    with pytest.raises(NotFound, match="should be kept"):
        store.prune([name, "ab" * 32], generation=6, protect_after=future())
    assert store.check(name, read_data=True).ok


def test_a_restore_of_a_forgotten_checkpoint_ends_well(store: Store, image: Path) -> None:
    name = checkpoint(store, [image])
    other = Store.open(store.location)
    with store.protect(name, label="restore"):
        for generation in (1, 2, 3):
            other.prune([], generation=generation, protect_after=future())
        assert store.read_bytes(images(store, name)[image.name]) == image.read_bytes()
    for generation in (4, 5):
        other.prune([], generation=generation, protect_after=future())
    with pytest.raises(NotFound), store.protect(name, label="restore"):
        pass
    assert not packs(store)


def test_many_index_objects_are_merged(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    kept = []
    for attempt in range(35):
        path.write_bytes(noise(5000, attempt))
        kept.append(checkpoint(store, [path], attempt))
    store.prune(kept, generation=1, protect_after=future())
    assert len(list(Path(store.location, "index").iterdir())) == 1
    assert all(Store.open(store.location).check(name, read_data=True).ok for name in kept)


# Killed at each failpoint


DOOMED = """
import time
store.put_object("logs/x", b"x")
name = checkpoint(2)
for generation in (1, 2):
    store.prune([name], generation=generation, protect_after=time.time() + 60)
"""


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    monkeypatch.setenv("MOORAGE_FAILPOINTS_DIR", str(folder))
    yield folder


def _points() -> list[str]:
    from moorage import failpoints

    return sorted(name for name in failpoints.declared() if name.startswith("store."))


@pytest.mark.parametrize("point", _points())
def test_a_process_killed_at_any_step_costs_nothing(store: Store, image: Path, armed: Path, point: str) -> None:
    """The old checkpoint stays whole, a new one can be made, and prune removes what was left behind."""
    # Old data in a pack of its own, mostly garbage, so that every step of prune has something to do.
    extra = image.with_name("extra")
    extra.write_bytes(noise(8 * MIB, 5))
    name = checkpoint(store, [image, extra], 0)
    old = checkpoint(store, [image], 1)
    image.write_bytes(image.read_bytes() + noise(MIB, 11))
    (armed / point).write_text("kill")
    process = child(CHILD + DOOMED, store.location, str(image))
    process.communicate()
    assert process.returncode == -9 and not (armed / point).exists(), f"{point} was not reached"
    fresh = Store.open(store.location)
    alive = [n for n in (name, old) if Path(store.location, "checkpoints", n).exists()]
    if ".prune." not in point:
        assert alive == [name, old]
    for found in alive:
        assert fresh.check(found, read_data=True).ok
    for lease in Path(store.location, "leases").iterdir():
        os.utime(lease, (1, 1))  # the killed process's lease has expired
    new = checkpoint(fresh, [image], 3)
    for generation in (11, 12, 13):
        fresh.prune([new], generation=generation, protect_after=future())
    assert fresh.check(new, read_data=True).ok
    left = {path.split("/")[0] for path in all_files(fresh)}
    assert left <= {"config", "keys", "packs", "index", "checkpoints", "pods", "prunes", "objects"}
    assert len([path for path in all_files(fresh) if path.startswith(("checkpoints/", "pods/"))]) == 2
    assert sum(path.stat().st_size for path in packs(fresh)) < 1.7 * image.stat().st_size


def test_processes_that_write_and_prune_at_once_do_not_hurt_each_other(store: Store, tmp_path: Path) -> None:
    processes = []
    for seed in range(2):
        path = tmp_path / str(seed)
        path.write_bytes(noise(2 * MIB, 42) + noise(MIB, seed))
        code = CHILD + "for attempt in range(6):\n    checkpoint(100 + attempt)\n"
        processes.append(child(code, store.location, str(path)))
    generation = 0
    while any(process.poll() is None for process in processes):
        generation += 1
        store.prune([], generation=generation, protect_after=time.time() - 600)
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    found = [path.name for path in Path(store.location, "checkpoints").iterdir()]
    assert len(found) == 12
    assert all(store.check(name, read_data=True).ok for name in found)
