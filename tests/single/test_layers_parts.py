"""Files are taken out of a running pod piece by piece, and only the pod's own."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import NotFound, UsageError
from moorage.worker.layers import FilePiece, PodLayers
from tests.support.layers import Bench, bench

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Bench]:
    with bench() as made:
        yield made


def _joined(pieces: Iterator[FilePiece]) -> dict[str, tuple[int, str, bytes]]:
    found: dict[str, tuple[int, str, bytes]] = {}
    ended = True
    for piece in pieces:
        assert len(piece.data) <= 1 << 20
        if ended:
            assert piece.path not in found
            found[piece.path] = (piece.mode, piece.link_target, piece.data)
        else:
            mode, target, data = found[piece.path]
            found[piece.path] = (mode, target, data + piece.data)
        ended = piece.last
    assert ended
    return found


def test_all_that_changed_comes_without_a_path(place: Bench) -> None:
    (place.job / "lower").write_text("x")
    (place.job / "gone").write_text("x")
    pod = place.start()
    (pod.root / "job/out").mkdir()
    (pod.root / "job/out/file").write_text("result")
    (pod.root / "job/gone").unlink()
    (pod.root / "job/link").symlink_to("/etc/passwd")
    (pod.root / "etc/elsewhere").write_text("x")
    os.mkfifo(pod.root / "job/fifo")
    found = _joined(pod.iter_parts())
    assert set(found) == {"out", "out/file", "link"}
    assert found["out/file"][2] == b"result"
    assert found["link"][1:] == ("/etc/passwd", b"")
    assert stat.S_ISDIR(found["out"][0])


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_file_of_any_size_is_whole(place: Bench, size: int) -> None:
    pod = place.start()
    data = os.urandom(size)
    (pod.root / "job/file").write_bytes(data)
    os.utime(pod.root / "job/file", ns=(0, 1_500_000_000))
    pieces = list(pod.iter_parts("file"))
    assert pieces[0].modified == 1.5
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert _joined(iter(pieces)) == {"file": (0o100644, "", data)}
    assert list(pod.iter_parts("/job/../job/./file")) == pieces


def test_a_folder_comes_with_what_is_in_it_from_both_layers(place: Bench) -> None:
    (place.job / "folder/sub").mkdir(parents=True)
    (place.job / "folder/sub/lower").write_text("l")
    pod = place.start()
    (pod.root / "job/folder/upper").write_text("u")
    found = _joined(pod.iter_parts("folder"))
    assert {path: data for path, (_, _, data) in found.items()} == {"sub": b"", "sub/lower": b"l", "upper": b"u"}


def test_links_are_resolved_inside_the_pod(place: Bench) -> None:
    pod = place.start()
    (pod.root / "etc/passwd").write_text("the pod's")
    (pod.root / "job/absolute").symlink_to("/etc/passwd")
    (pod.root / "job/upward").symlink_to("../../../../../../../etc/passwd")
    (pod.root / "job/folder").symlink_to("/etc")
    (pod.root / "job/chain").symlink_to("folder/passwd")
    (pod.root / "job/loop").symlink_to("loop")
    for path in ("absolute", "upward", "folder/passwd", "chain", "/../../job/absolute"):
        assert _joined(pod.iter_parts(path)) == {"passwd": (0o100644, "", b"the pod's")}
    for path in ("loop", "absent", "folder/passwd/file", f"/{place.top}/pod1/layers.json"):
        with pytest.raises(NotFound):
            list(pod.iter_parts(path))


def test_a_fifo_a_socket_and_a_live_mount_are_refused(place: Bench) -> None:
    pod = place.start(user_mounts=["/data"])
    os.mkfifo(pod.root / "job/fifo")
    (pod.root / "job/data").symlink_to("/data/x")
    for path in ("fifo", "/data", "/data/file", "data"):
        with pytest.raises(UsageError):
            list(pod.iter_parts(path))


def test_a_name_that_is_no_text_is_escaped(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job" / os.fsdecode(b"a\xff")).write_text("x")
    assert set(_joined(pod.iter_parts())) == {"a\\xff"}


def test_a_pod_that_swaps_folders_for_links_never_shows_the_host(place: Bench) -> None:
    """A race that the pod may win or lose, but that leads nowhere."""
    secret = place.top / "secret"
    secret.mkdir()
    (secret / "file").write_text("host's secret")
    pod = place.start()
    job = pod.root / "job"
    (job / "folder").mkdir()
    (job / "folder/file").write_text("the pod's")
    (job / "evil").symlink_to(f"../../../../../../../../{secret}")
    (job / "evil-absolute").symlink_to(secret)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for evil in ("evil", "evil-absolute"):
                (job / "folder").rename(job / "aside")
                (job / evil).rename(job / "folder")
                (job / "folder").rename(job / evil)
                (job / "aside").rename(job / "folder")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(150):
            for path in ("folder/file", "folder", ""):
                assert _contents(pod, path) <= {b"the pod's", b""}
    finally:
        done.set()
        thread.join()


def _contents(pod: PodLayers, path: str) -> set[bytes]:
    try:
        return {data for _, _, data in _joined(pod.iter_parts(path)).values()}
    except (NotFound, OSError, AssertionError):
        return set()  # it was being swapped


def test_pieces_do_not_depend_on_the_state_folder_being_reached_by_its_real_path(place: Bench) -> None:
    (place.top / "alias").symlink_to(place.top)
    pod = PodLayers.plan(Path(place.top / "alias/pod5"), image=place.image, working_directory="/job")
    pod.mount()
    assert pod.mounted
    (pod.root / "job/file").write_text("x")
    assert set(_joined(pod.iter_parts())) == {"file"}
    pod.remove()
