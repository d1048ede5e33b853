"""A capture copies what changed since the last one, and never too little."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.layers import CaptureIndex, LayerCapture, PodLayers, mapped_shared_writable
from moorage.worker.layers.syscalls import CLOCK_REALTIME_COARSE
from tests.support.layers import Bench, bench, picture

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Bench]:
    with bench() as made:
        yield made


def _next_tick() -> None:
    """Wait until the clock of the file systems has passed every stamp that they have given so far."""
    now = time.time_ns()
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= now:
        time.sleep(0.001)


def _restored(place: Bench, tree: bytes, index: CaptureIndex, name: str) -> bytes:
    return (place.restore(tree, index)[0].root / "job" / name).read_bytes()


def test_only_changed_files_are_copied_again(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    for number in range(20):
        (job / f"small{number}").write_bytes(os.urandom(1000))
        (job / f"large{number}").write_bytes(os.urandom(300_000))
    _next_tick()
    _, index, first = place.capture(pod)
    assert first.bytes_new == first.bytes_total == 20 * 301_000
    (job / "small3").write_bytes(b"new")
    with (job / "large5").open("r+b") as file:
        file.write(b"new")
    (job / "large6").rename(job / "moved")
    _next_tick()
    tree, index, second = place.capture(pod, index)
    assert second.bytes_new == 3 + 300_000 + 300_000
    assert second.bytes_total == 20 * 301_000 - 997
    _, _, third = place.capture(pod, index)
    assert third.bytes_new == 0
    assert picture(place.restore(tree, index)[0].root) == picture(pod.root)


def test_a_change_of_owner_mode_or_attribute_alone_is_seen(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    for name in ("owner", "mode", "attribute", "time"):
        (job / name).write_bytes(b"x" * 10)
    _next_tick()
    _, index, _ = place.capture(pod)
    os.chown(job / "owner", 7, 8)
    (job / "mode").chmod(0o600)
    os.setxattr(job / "attribute", "user.a", b"1")
    os.utime(job / "time", ns=(1, 2))
    tree, index, _ = place.capture(pod, index)
    assert picture(place.restore(tree, index)[0].root) == picture(pod.root)


def test_a_write_in_the_same_tick_as_the_capture_is_not_missed(place: Bench) -> None:
    """Racily clean: size and stamps equal, content not."""
    pod = place.start()
    file = pod.root / "job/file"
    for number in range(50):
        file.write_bytes(b"%03d" % number)
        _, index, _ = place.capture(pod)
        with file.open("r+b") as stream:  # the same inode and size, most times in the same tick
            stream.write(b"new")
        tree, index, _ = place.capture(pod, index)
        stored = [place.store.data[content.chunks[0].name] for content in index.contents.values()]
        assert any(b"new" in data for data in stored), number
        if number == 49:
            assert _restored(place, tree, index, "file") == b"new"


def test_restoring_gives_an_index_that_spares_the_first_capture_everything(place: Bench) -> None:
    pod = place.start()
    for number in range(30):
        (pod.root / f"job/{number}").write_bytes(os.urandom(20_000 * number))
    os.link(pod.root / "job/29", pod.root / "job/link")
    tree, index, _ = place.capture(pod)
    moved, restored = place.restore(tree, index)
    again, restored, capture = place.capture(moved, restored)
    assert capture.files == ()
    assert capture.bytes_total > 8_000_000
    assert picture(place.restore(again, restored)[0].root) == picture(pod.root)


def test_an_index_of_another_file_system_is_not_trusted(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/file").write_bytes(b"x" * 100)
    _next_tick()
    _, index, _ = place.capture(pod)
    index.layers["root"].device += 1
    _, _, capture = place.capture(pod, index)
    assert capture.bytes_new == 100


def test_the_index_survives_its_encoding(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/file").write_bytes(b"x" * 100)
    os.setxattr(pod.root / "job/file", "user.a", b"\0")
    _next_tick()
    _, index, _ = place.capture(pod)
    _, _, capture = place.capture(pod, CaptureIndex.decode(index.encode()))
    assert capture.bytes_new == 0


def test_a_capture_survives_its_encoding(place: Bench) -> None:
    pod = place.start()
    for number in range(3):
        (pod.root / f"job/{number}").write_bytes(os.urandom(200_000 * number))
    _, index, _ = place.capture(pod)
    (pod.root / "job/new").write_text("x")
    again = LayerCapture.decode(pod.capture(place.top / "staging", index).encode())
    tree, index = place.store.persist(again)
    assert not (place.top / "staging/layers").exists()
    assert picture(place.restore(tree, index)[0].root) == picture(pod.root)


def test_packs_of_which_most_is_dead_are_written_anew(place: Bench) -> None:
    pod = place.start()
    job = pod.root / "job"
    for number in range(10):
        (job / str(number)).write_bytes(os.urandom(10_000))
    _next_tick()
    _, index, _ = place.capture(pod)
    for number in range(7):
        (job / str(number)).unlink()
    _, index, second = place.capture(pod, index)
    assert second.bytes_new == 0
    tree, index, third = place.capture(pod, index)
    assert third.bytes_new == 30_000
    assert sum(content.size for content in index.contents.values()) == 30_000
    assert picture(place.restore(tree, index)[0].root) == picture(pod.root)


class _Mapping:
    """A file of a pod, mapped shared in this process, written to through the mapping."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)

    def write(self, data: bytes) -> None:
        self.map[: len(data)] = data

    def protect(self, protection: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(self.map)), protection) == 0


def _mapped_pod(place: Bench, *, lower: bool) -> tuple[PodLayers, _Mapping]:
    data = b"old" + bytes(8189)
    (place.job / "file").write_bytes(data) if lower else None
    pod = place.start()
    if not lower:
        (pod.root / "job/file").write_bytes(data)
    return pod, _Mapping(pod.root / "job/file")


@pytest.mark.parametrize("lower", [False, True])
def test_a_page_that_was_dirty_already_is_captured_though_no_stamp_changes(place: Bench, lower: bool) -> None:
    pod, mapping = _mapped_pod(place, lower=lower)
    mapping.write(b"one")
    _next_tick()
    forced = mapped_shared_writable([os.getpid()])
    tree, index, _ = place.capture(pod, None, forced)
    assert _restored(place, tree, index, "file").startswith(b"one")
    before = (pod._layers[0].upper / "job/file").stat()
    mapping.write(b"two")
    after = (pod._layers[0].upper / "job/file").stat()
    assert (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns), "the trap is gone"
    tree, index, _ = place.capture(pod, index, mapped_shared_writable([os.getpid()]))
    assert _restored(place, tree, index, "file").startswith(b"two")


def test_a_mapping_that_went_away_between_two_captures_is_not_forgotten(place: Bench) -> None:
    pod, mapping = _mapped_pod(place, lower=False)
    mapping.write(b"one")
    _next_tick()
    _, index, _ = place.capture(pod, None, mapped_shared_writable([os.getpid()]))
    mapping.write(b"two")
    mapping.map.close()
    _next_tick()  # where the kernel has written the page meanwhile, the write stamped the file
    tree, index, _ = place.capture(pod, index, mapped_shared_writable([os.getpid()]))
    assert _restored(place, tree, index, "file").startswith(b"two")
    _, _, capture = place.capture(pod, index, mapped_shared_writable([os.getpid()]))
    assert capture.bytes_new == 0


def test_a_mapping_that_is_read_only_for_the_moment_counts(place: Bench) -> None:
    pod, mapping = _mapped_pod(place, lower=False)
    mapping.write(b"one")
    mapping.protect(mmap.PROT_READ)
    _next_tick()
    _, index, _ = place.capture(pod, None, mapped_shared_writable([os.getpid()]))
    mapping.protect(mmap.PROT_READ | mmap.PROT_WRITE)
    mapping.write(b"two")
    mapping.protect(mmap.PROT_READ)
    tree, index, _ = place.capture(pod, index, mapped_shared_writable([os.getpid()]))
    assert _restored(place, tree, index, "file").startswith(b"two")


def test_read_only_and_private_mappings_force_nothing(place: Bench) -> None:
    pod = place.start()
    path = pod.root / "job/file"
    path.write_bytes(b"x" * 9000)
    before = mapped_shared_writable([os.getpid()])
    fd = os.open(path, os.O_RDONLY)
    shared = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(fd)
    fd = os.open(path, os.O_RDWR)
    private = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    assert mapped_shared_writable([os.getpid()]) == before
    shared.close()
    private.close()


def test_a_process_that_is_gone_has_nothing_mapped() -> None:
    assert mapped_shared_writable([2**22 - 1]) == set()


def test_ten_thousand_small_files_make_few_staged_ones() -> None:
    # In memory: a disk that has just deleted as many files is slow at making new ones.
    with bench("/dev/shm") as place:
        pod = place.start()
        for folder in range(100):
            (pod.root / f"job/{folder}").mkdir()
            for number in range(100):
                (pod.root / f"job/{folder}/{number}").write_bytes(b"%d" % number * 50)
        _next_tick()
        tree, index, capture = place.capture(pod)
        assert len(capture.files) == 1
        assert capture.entries == 10_102
        moved, index = place.restore(tree, index)
        assert picture(moved.root) == picture(pod.root)
        _, _, capture = place.capture(moved, index)
        assert capture.files == ()
