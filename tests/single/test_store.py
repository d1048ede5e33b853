"""The store on a real file system: what comes back, and how it is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moorage.errors import (
    Conflict,
    CorruptData,
    EnvironmentLacking,
    MoorageError,
    NewerVersion,
    NotFound,
    UsageError,
)
from moorage.store import Store
from tests.support.store_files import MIB, checkpoint, child, images, noise


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """3 MiB of noise, 2 MiB of zeros, text, and an odd end."""
    path = tmp_path / "pages-1.img"
    path.write_bytes(noise(3 * MIB, 1) + bytes(2 * MIB) + b"all work and no play " * 100_000 + noise(12345, 2))
    return path


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
        ("gs://bucket/x", EnvironmentLacking, "no gs storage"),
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
