"""Whatever a pod does to its files is the same after capture and restore."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.worker.layers import PodLayers
from tests.support.layers import Bench, bench, picture

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Bench]:
    with bench() as made:
        yield made


def _move_and_compare(place: Bench, pod: PodLayers) -> PodLayers:
    moved = place.move(pod)
    assert picture(moved.root) == picture(pod.root)
    assert picture(moved._layers[0].upper, overlay=True) == picture(pod._layers[0].upper, overlay=True)
    assert moved.root.stat().st_mode == pod.root.stat().st_mode
    return moved


def test_every_kind_of_file_comes_back(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    (job / "empty").touch()
    (job / "small").write_bytes(b"x" * 1000)
    (job / "large").write_bytes(os.urandom(3 << 20))
    (job / "link").symlink_to("../etc/../job/small")
    (job / "dangling").symlink_to("/nowhere/\udcff")
    os.mkfifo(job / "fifo", 0o622)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(job / "sock"))
    os.mknod(job / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(job / "block", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    (job / os.fsdecode(b"name\xff\xfe\n ")).write_text("bytes")
    (job / "suid").write_text("x")
    os.chown(job / "suid", 12, 34)
    (job / "suid").chmod(0o6711)
    os.chown(job / "link", 1000, 1001, follow_symlinks=False)
    os.utime(job / "small", ns=(1_000_000_001, -5_000_000_007))
    os.utime(job / "link", ns=(3, 4), follow_symlinks=False)
    folder = job / "folder"
    folder.mkdir(0o2750)
    (folder / "child").touch()
    folder.chmod(0o1500)
    os.utime(folder, ns=(7, 123_456_789_123_456_789))
    moved = place.move(pod)
    assert (moved.root / "job/small").stat().st_mtime_ns == -5_000_000_007
    assert (moved.root / "job/small").stat().st_atime_ns == 1_000_000_001
    moved = _move_and_compare(place, pod)
    assert (moved.root / "job/folder").stat().st_mtime_ns == 123_456_789_123_456_789


def test_hard_links_of_every_kind_stay_links(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    (job / "b").write_bytes(os.urandom(400_000))
    (job / "sub").mkdir()
    os.link(job / "b", job / "sub/other")
    os.link(job / "b", job / "a")
    os.mkfifo(job / "fifo")
    os.link(job / "fifo", job / "fifo2")
    (job / "sym").symlink_to("b")
    os.link(job / "sym", job / "sym2", follow_symlinks=False)
    moved = _move_and_compare(place, pod)
    (moved.root / "job/a").write_text("one file")
    assert (moved.root / "job/sub/other").read_text() == "one file"
    assert (moved.root / "job/b").stat().st_nlink == 3


def test_what_was_deleted_in_the_lower_layer_stays_deleted(place: Bench) -> None:
    (place.job / "file").write_text("x")
    (place.job / "folder").mkdir()
    (place.job / "folder/in").write_text("x")
    (place.job / "again").mkdir()
    (place.job / "again/old").write_text("x")
    (place.job / "becomes-file").mkdir()
    (place.job / "becomes-folder").write_text("x")
    for number in range(5):
        (place.job / f"gone{number}").write_text("whiteouts share one inode")
    pod = place.start()
    job = pod.root / "job"
    (job / "file").unlink()
    (job / "folder/in").unlink()
    (job / "folder").rmdir()
    (job / "again/old").unlink()
    (job / "again").rmdir()
    (job / "again").mkdir()
    (job / "again/new").write_text("opaque")
    (job / "becomes-file").rmdir()
    (job / "becomes-file").write_text("file")
    (job / "becomes-folder").unlink()
    (job / "becomes-folder").mkdir()
    for number in range(5):
        (job / f"gone{number}").unlink()
    moved = _move_and_compare(place, pod)
    assert sorted(p.name for p in (moved.root / "job").iterdir()) == ["again", "becomes-file", "becomes-folder"]
    assert [p.name for p in (moved.root / "job/again").iterdir()] == ["new"]


def test_folders_of_the_lower_layer_can_be_renamed_and_move_along(place: Bench) -> None:
    (place.job / "one/deep").mkdir(parents=True)
    (place.job / "one/deep/file").write_text("from below")
    (place.job / "one/other").write_text("x")
    pod = place.start()
    job = pod.root / "job"
    (job / "one").rename(job / "two")
    (job / "two/deep/added").write_text("new")
    (job / "two/deep").rename(pod.root / "etc/deep")
    moved = _move_and_compare(place, pod)
    assert (moved.root / "etc/deep/file").read_text() == "from below"
    assert (moved.root / "etc/deep/added").read_text() == "new"
    assert not (moved.root / "job/one").exists()


def test_extended_attributes_and_acls_come_back(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    (job / "file").write_text("x")
    (job / "folder").mkdir()
    (job / "folder/no-acl").write_text("made before the default ACL")
    os.setxattr(job / "file", "user.note", b"\0\xff bytes")
    os.setxattr(job / "folder", "user.note", b"")
    os.setxattr(job / "file", "trusted.moorage-test", b"t")
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service, effective
    os.setxattr(job / "file", "security.capability", capability)
    (job / "link").symlink_to("file")
    os.setxattr(job / "link", "trusted.on-link", b"l", follow_symlinks=False)
    nobody = 2**32 - 1
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, permissions, who)
        for tag, permissions, who in [(1, 7, nobody), (2, 5, 1234), (4, 5, nobody), (16, 7, nobody), (32, 0, nobody)]
    )
    os.setxattr(job / "folder", "system.posix_acl_default", acl)
    os.setxattr(job / "folder", "system.posix_acl_access", acl)
    (job / "folder/with-acl").write_text("inherits")
    moved = _move_and_compare(place, pod)
    assert os.getxattr(moved.root / "job/file", "security.capability") == capability
    assert os.getxattr(moved.root / "job/folder", "system.posix_acl_default") == acl
    assert "system.posix_acl_access" not in os.listxattr(moved.root / "job/folder/no-acl")


def test_holes_stay_holes(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    with (job / "sparse").open("wb") as file:
        file.seek(10 << 20)
        file.write(b"a" * 5000)
        file.seek(30 << 20)
        file.write(os.urandom(1 << 20))
        file.truncate(100 << 20)
    with (job / "only-hole").open("wb") as file:
        file.truncate(50 << 20)
    with (job / "small-sparse").open("wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
    tree, index, capture = place.capture(pod)
    assert capture.bytes_new < 2 << 20
    moved, _ = place.restore(tree, index)
    for name in ("sparse", "small-sparse"):
        assert (moved.root / "job" / name).read_bytes() == (job / name).read_bytes()
    for name in ("sparse", "only-hole", "small-sparse"):
        assert (moved.root / "job" / name).stat().st_size == (job / name).stat().st_size
        assert (moved.root / "job" / name).stat().st_blocks <= (job / name).stat().st_blocks + 8


def test_very_deep_folders_and_long_paths_come_back(place: Bench) -> None:
    pod = place.start()
    here = os.open(pod.root / "job", os.O_RDONLY)
    part = "d" * 20
    for _ in range(1100):  # 23,000 characters: no call takes such a path, and no process may have so many descriptors
        os.mkdir(part, dir_fd=here)
        child = os.open(part, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = child
    fd = os.open("file", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here)
    os.write(fd, b"deep" * 100_000)
    os.close(fd)
    os.link("file", "link", src_dir_fd=here, dst_dir_fd=here)
    os.close(here)
    moved = place.move(pod)
    assert picture(moved.root) == picture(pod.root)


def test_a_pod_that_wrote_nothing_comes_back(place: Bench) -> None:
    _move_and_compare(place, place.start())


def test_a_checkpoint_can_be_moved_again_and_again(place: Bench) -> None:
    (place.job / "lower").write_text("x")
    pod = place.start()
    index = None
    for number in range(4):
        job = pod.root / "job"
        (job / f"file{number}").write_bytes(os.urandom(100))
        (job / f"large{number}").write_bytes(os.urandom(300_000))
        tree, index, _ = place.capture(pod, index)
        moved, index = place.restore(tree, index)
        assert picture(moved.root) == picture(pod.root)
        pod = moved
    assert len(list((pod.root / "job").iterdir())) == 9


_NAMES = st.sampled_from(["a", "b", "c", "dir", "x y", "\u00e9"])
_STEPS = st.one_of(
    st.tuples(st.just("write"), _NAMES, _NAMES, st.integers(0, 400_000)),
    st.tuples(st.just("append"), _NAMES, _NAMES, st.integers(1, 5000)),
    st.tuples(st.just("mkdir"), _NAMES, _NAMES, st.integers(0, 0o777)),
    st.tuples(st.just("remove"), _NAMES, _NAMES, st.just(0)),
    st.tuples(st.just("rename"), _NAMES, _NAMES, st.integers(0, 5)),
    st.tuples(st.just("link"), _NAMES, _NAMES, st.integers(0, 5)),
    st.tuples(st.just("symlink"), _NAMES, _NAMES, st.integers(0, 5)),
    st.tuples(st.just("chmod"), _NAMES, _NAMES, st.integers(0, 0o7777)),
    st.tuples(st.just("chown"), _NAMES, _NAMES, st.integers(0, 70_000)),
    st.tuples(st.just("hole"), _NAMES, _NAMES, st.integers(1, 3_000_000)),
)


_Step = tuple[str, str, str, int]


def _do(job: Path, step: _Step, number: int) -> None:
    verb, folder, name, argument = step
    path = job / folder / name
    other = job / ["a", "b", "c", "dir", "x y", "\u00e9"][argument % 6] / folder
    try:
        match verb:
            case "write":
                path.write_bytes(bytes([number % 256]) * argument)
            case "append":
                with path.open("ab") as file:
                    file.write(b"+" * argument)
            case "mkdir":
                (job / folder).mkdir(exist_ok=True)
                path.mkdir(argument)
            case "remove":
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            case "rename":
                path.rename(other)
            case "link":
                os.link(path, other, follow_symlinks=False)
            case "symlink":
                path.symlink_to(f"../{name}")
            case "chmod":
                path.chmod(argument)
            case "chown":
                os.chown(path, argument, argument, follow_symlinks=False)
            case "hole":
                with path.open("r+b") as file:
                    file.truncate(argument)
    except OSError:
        pass  # most steps do not fit the tree as it is; those that do are the test


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    before=st.lists(_STEPS, max_size=25),
    rounds=st.lists(st.tuples(st.booleans(), st.lists(_STEPS, max_size=25)), min_size=1, max_size=4),
)
def test_any_history_comes_back_the_same(before: list[_Step], rounds: list[tuple[bool, list[_Step]]]) -> None:
    # In memory: a disk that has just deleted many files is slow at making new ones.
    with bench("/dev/shm") as place:
        for name in ("a", "b", "dir"):
            (place.job / name).mkdir()
        for number, step in enumerate(before):
            _do(place.job, step, number)
        pod = place.start()
        index = None
        for move, steps in rounds:
            for number, step in enumerate(steps):
                _do(pod.root / "job", step, number + 100)
            tree, index, _ = place.capture(pod, index)
            moved, restored = place.restore(tree, index)
            assert picture(moved.root) == picture(pod.root)
            if move:
                pod, index = moved, restored
