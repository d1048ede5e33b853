"""The mounted root file system of a pod: what it shows, what it hides, and how it goes away."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import Conflict, CorruptData, EnvironmentLacking, Incompatible, NotFound, UsageError
from moorage.worker.layers import PodLayers, check_upper
from moorage.worker.layers.state import State
from moorage.worker.layers.syscalls import mount
from tests.support.layers import Bench, bench, picture

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Bench]:
    with bench() as made:
        yield made


def test_a_disk_can_carry_upper_layers(place: Bench) -> None:
    check_upper(place.top)
    assert {path.name for path in place.top.iterdir()} == {"image"}


def test_an_overlay_cannot_carry_upper_layers(place: Bench) -> None:
    with pytest.raises(EnvironmentLacking, match="lies on an overlay") as caught:
        check_upper(place.start().root / "job")
    assert "ext4" in caught.value.hint


def test_the_host_root_is_the_lower_layer_without_an_image(place: Bench) -> None:
    pod = place.start(image=None, working_directory=str(place.job))
    assert (pod.root / "etc/passwd").read_bytes() == Path("/etc/passwd").read_bytes()
    assert stat.S_IMODE(pod.root.stat().st_mode) == stat.S_IMODE(Path("/").stat().st_mode)
    (pod.root / "etc/only-in-the-pod").touch()
    assert not Path("/etc/only-in-the-pod").exists()


def test_folders_of_moorage_are_not_seen_and_not_captured(place: Bench) -> None:
    (place.top / "state").mkdir()
    (place.top / "state/secret").write_text("key")
    pod = place.start(image=None, working_directory=str(place.job), hidden=[place.top / "state"])
    inside = pod.root / str(place.top)[1:]
    assert {path.name for path in inside.iterdir()} == {"image"}  # the pod's own folder is hidden too
    for path in ("var", "var/tmp"):  # made in the upper layer for the sake of what is hidden in them
        there, here = Path("/", path).stat(), (pod.root / path).stat()
        assert (there.st_mode, there.st_uid, there.st_gid) == (here.st_mode, here.st_uid, here.st_gid)
    tree, index, _ = place.capture(pod)
    moved, _ = place.restore(tree, index, image=None)
    shown = {path.name for path in (moved.root / str(place.top)[1:]).iterdir()}
    assert shown == {"image", "state", "pod1", "staging"}  # nothing asks to hide them on this "host"
    (inside / "state").mkdir()
    (inside / "state/own").write_text("the pod's own folder of that name")
    tree, index, _ = place.capture(pod)
    moved, _ = place.restore(tree, index, image=None, hidden=[place.top / "state"])
    assert [path.name for path in (moved.root / str(place.top)[1:] / "state").iterdir()] == ["own"]


def test_a_working_directory_that_is_hidden_is_refused(place: Bench) -> None:
    with pytest.raises(UsageError, match="hides from pods"):
        place.plan(image=None, working_directory=str(place.job), hidden=[place.top])


@pytest.mark.parametrize("path", ["/dev/shm", "/proc/self", "relative"])
def test_a_working_directory_on_a_file_system_of_the_pod_is_refused(place: Bench, path: str) -> None:
    with pytest.raises(UsageError):
        place.plan(image=None, working_directory=path)


@pytest.mark.parametrize("with_image", [False, True])
def test_a_working_directory_that_does_not_exist_is_refused(place: Bench, with_image: bool) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        place.plan(image=place.image if with_image else None, working_directory="/no/such/folder")


def _second_disk(place: Bench) -> Path:
    disk = place.top / "disk"
    disk.mkdir()
    mount("tmpfs", disk, "tmpfs", 0, "size=16m")
    (disk / "job").mkdir()
    (disk / "job/script").write_text("print()")
    return disk


def test_a_host_mount_with_the_working_directory_gets_an_overlay_of_its_own(place: Bench) -> None:
    disk = _second_disk(place)
    pod = place.start(image=None, working_directory=str(disk / "job"), interpreters=[sys.executable])
    (bind,) = pod.binds
    assert bind.destination == str(disk)
    assert (bind.source / "job/script").read_text() == "print()"
    (bind.source / "job/result").write_text("done")
    (bind.source / "job/script").unlink()
    (pod.root / "etc/in-root").write_text("x")
    assert sorted((change.kind, change.path) for change in pod.changed_below()) == [
        ("created", b"result"),
        ("deleted", b"script"),
    ]
    tree, index, _ = place.capture(pod)
    moved, _ = place.restore(tree, index, image=None)
    (moved_bind,) = moved.binds
    assert (moved_bind.destination, moved_bind.key) == (bind.destination, bind.key)
    assert picture(moved_bind.source) == picture(bind.source)
    assert (moved.root / "etc/in-root").read_text() == "x"
    assert [piece.path for piece in moved.iter_parts("result")] == ["result"]


def test_an_interpreter_on_another_mount_gets_an_overlay_through_its_links(place: Bench) -> None:
    disk = _second_disk(place)
    (disk / "py/bin").mkdir(parents=True)
    (disk / "py/bin/python").write_text("#!")
    (place.top / "venv").mkdir()
    (place.top / "venv/python").symlink_to("python3")
    (place.top / "venv/python3").symlink_to(disk / "py/bin/python")
    options = {"image": None, "working_directory": str(place.job), "interpreters": [str(place.top / "venv/python")]}
    assert [bind.destination for bind in place.plan(**options).binds] == [str(disk)]
    assert place.plan(**options, user_mounts=[str(disk)]).binds == ()


def test_a_node_without_a_mount_point_of_the_pod_says_so(place: Bench) -> None:
    disk = _second_disk(place)
    pod = place.start(image=None, working_directory=str(disk / "job"))
    tree, _, _ = place.capture(pod)
    pod.remove()
    subprocess.run(["umount", disk], check=True)
    disk.rmdir()
    with pytest.raises(Incompatible, match="disk"):
        PodLayers.from_tree(place.top / "pod9", tree, image=None)


def test_paths_with_characters_that_mean_something_to_mount(place: Bench) -> None:
    odd = place.top / "a,b:c\\d e"
    (odd / "im:a,ge/job").mkdir(parents=True)
    (odd / "im:a,ge/job/file").write_text("x")
    pod = PodLayers.plan(odd / "pod,1:", image=odd / "im:a,ge", working_directory="/job")
    pod.mount()
    assert (pod.root / "job/file").read_text() == "x"
    (pod.root / "job/file").write_text("y")
    assert (odd / "pod,1:/upper/job/file").read_text() == "y"
    assert pod.mounted
    pod.remove()
    assert {path.name for path in (odd / "pod,1:").iterdir()} == {"layers.json"}


def test_identity_replaces_even_a_symlink_and_stays_in_the_pod(place: Bench) -> None:
    outside = place.top / "outside"
    outside.write_text("host's")
    (place.image / "etc/resolv.conf").symlink_to(outside)
    pod = place.start()
    pod.write_identity(hostname="pod-0", hosts="127.0.0.1 localhost\n", resolv_conf="nameserver 10.0.0.1\n")
    assert (pod.root / "etc/resolv.conf").read_text() == "nameserver 10.0.0.1\n"
    assert not (pod.root / "etc/resolv.conf").is_symlink()
    assert (pod.root / "etc/hostname").read_text() == "pod-0\n"
    assert outside.read_text() == "host's"
    assert (place.image / "etc/resolv.conf").is_symlink()


def test_putting_a_file_follows_the_links_of_the_pod_and_never_leaves_it(place: Bench) -> None:
    (place.top / "usr").mkdir()
    (place.image / "usr/lib").mkdir(parents=True)
    (place.image / "lib").symlink_to("usr/lib")
    (place.image / "escape").symlink_to(f"../../../../../../{place.top}/usr")
    pod = place.start()
    pod.put("/lib/init", b"binary", mode=0o755)
    assert (pod.root / "usr/lib/init").read_bytes() == b"binary"
    assert stat.S_IMODE((pod.root / "usr/lib/init").stat().st_mode) == 0o755
    pod.put("/new/folder/file", b"x", uid=5, gid=6)
    assert (pod.root / "new/folder/file").stat().st_uid == 5
    with pytest.raises(NotFound):
        pod.put("/escape/file", b"x")
    assert list((place.top / "usr").iterdir()) == []


def test_another_process_takes_over_by_the_folder(place: Bench) -> None:
    pod = place.start(user_mounts=["/data/"])
    (pod.root / "job/file").write_text("x")
    other = PodLayers.load(pod.folder)
    assert other.mounted
    assert other.working_directory == "/job"
    other.mount()
    assert [change.path for change in other.changed_below()] == [b"file"]
    other.unmount()
    assert not pod.mounted
    other.unmount()
    with pytest.raises(Conflict, match="not mounted"):
        list(pod.iter_parts())
    pod.mount()  # the same boot: the upper layer is whole
    assert (pod.root / "job/file").read_text() == "x"
    with pytest.raises(NotFound):
        PodLayers.load(place.top / "pod77")


def test_an_upper_layer_that_was_in_use_when_the_host_went_down_is_refused(place: Bench) -> None:
    pod = place.start()
    pod.unmount()
    state = State.read(pod.folder)
    (pod.folder / "layers.json").write_text((pod.folder / "layers.json").read_text().replace(state.boot, "earlier"))
    with pytest.raises(CorruptData, match="went down"):
        PodLayers.load(pod.folder).mount()


def test_a_root_that_is_still_in_use_goes_away_all_the_same(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/file").write_text("x")
    fd = os.open(pod.root / "job/file", os.O_RDONLY)
    try:
        pod.remove()
        assert not pod.mounted
        assert {path.name for path in pod.folder.iterdir()} == {"layers.json"}
    finally:
        os.close(fd)
    pod.remove()


def test_removing_deletes_nothing_below_and_nothing_behind_links(place: Bench) -> None:
    (place.job / "lower").write_text("x")
    (place.top / "outside").mkdir()
    (place.top / "outside/file").write_text("x")
    pod = place.start()
    (pod.root / "job/link").symlink_to(place.top / "outside")
    here = os.open(pod.root / "job", os.O_RDONLY)
    for _ in range(1200):  # deeper than Python's recursion goes
        os.mkdir("d", dir_fd=here)
        child = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = child
    os.close(here)
    pod.remove()
    assert (place.job / "lower").read_text() == "x"
    assert (place.top / "outside/file").read_text() == "x"
