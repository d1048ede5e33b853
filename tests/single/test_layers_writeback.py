"""Results come back to the host as the job's owner, and harm nothing there."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import MoorageError, NotFound
from moorage.worker.layers import PodLayers, WriteBack
from moorage.worker.layers.owner import Owner, acting_as
from moorage.worker.layers.syscalls import CLOCK_REALTIME_COARSE, mount
from tests.support.layers import Bench, bench

pytestmark = pytest.mark.root

_UID, _GID = 4321, 4322
_BESIDE = ".moorage-j1-0"


@pytest.fixture
def place() -> Iterator[Bench]:
    with bench() as made:
        made.top.chmod(0o755)
        os.chown(made.job, _UID, _GID)
        yield made


def _start(place: Bench) -> PodLayers:
    """A pod whose working directory is a folder of the host, through an overlay of the host's root."""
    for folder, folders, files in os.walk(place.job):
        for name in (*folders, *files):
            os.chown(Path(folder, name), _UID, _GID, follow_symlinks=False)
    now = time.time_ns()
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= now:  # the next tick of the clock that files are stamped with
        time.sleep(0.001)
    return place.start(image=None, working_directory=str(place.job))


def _inside(place: Bench, pod: PodLayers) -> Path:
    return pod.root / str(place.job)[1:]


def _write_back(pod: PodLayers, target: Path | None = None, pod_number: int = 0) -> WriteBack:
    return pod.write_back(target, uid=_UID, gid=_GID, job="j1", pod=pod_number)


def _changed_by_host(path: Path, text: str) -> None:
    path.write_text(text)


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_what_changed_is_written_as_the_owner(place: Bench) -> None:
    (place.job / "kept").write_text("kept")
    (place.job / "old").write_text("old")
    (place.job / "gone").write_text("gone")
    (place.job / "folder").mkdir()
    (place.job / "folder/in").write_text("in")
    pod = _start(place)
    job = _inside(place, pod)
    (job / "old").write_text("new")
    (job / "gone").unlink()
    (job / "out/deep").mkdir(parents=True)
    (job / "out/deep/result").write_bytes(os.urandom(300_000))
    (job / "out").chmod(0o750)
    (job / "link").symlink_to("out/deep/result")
    (job / "program").write_text("#!")
    (job / "program").chmod(0o4755)
    os.utime(job / "program", ns=(10**9, 2 * 10**9))
    (job / "folder/in").unlink()
    (job / "folder").rmdir()
    report = _write_back(pod)
    assert report == WriteBack(
        written=["link", "old", "out", "out/deep", "out/deep/result", "program"], deleted=["folder", "gone"]
    )
    assert _names(place.job) == ["kept", "link", "old", "out", "out/deep", "out/deep/result", "program"]
    assert (place.job / "old").read_text() == "new"
    assert (place.job / "out/deep/result").read_bytes() == (job / "out/deep/result").read_bytes()
    assert (place.job / "link").readlink() == Path("out/deep/result")
    assert stat.S_IMODE((place.job / "out").stat().st_mode) == 0o750
    program = (place.job / "program").stat()
    assert (stat.S_IMODE(program.st_mode), program.st_mtime_ns) == (0o755, 2 * 10**9)
    for path in ("old", "out", "out/deep/result", "program", "link"):
        status = (place.job / path).lstat()
        assert (status.st_uid, status.st_gid) == (_UID, _GID)


def test_doing_it_again_changes_nothing(place: Bench) -> None:
    pod = _start(place)
    (_inside(place, pod) / "folder").mkdir()
    (_inside(place, pod) / "folder/file").write_text("x")
    (_inside(place, pod) / "link").symlink_to("x")
    _write_back(pod)
    assert _write_back(pod) == WriteBack()


def test_a_file_that_was_only_opened_for_writing_is_no_change(place: Bench) -> None:
    (place.job / "data").write_text("x")
    pod = _start(place)
    with (_inside(place, pod) / "data").open("r+"):
        pass
    assert (pod._layers[0].upper / str(place.job)[1:] / "data").exists()
    assert list(pod.changed_below()) == []


def test_what_the_host_changed_since_the_start_stays(place: Bench) -> None:
    for name in ("file", "deleted", "replaced"):
        (place.job / name).write_text("before")
    pod = _start(place)
    job = _inside(place, pod)
    (job / "file").write_text("pod's")
    (job / "deleted").unlink()
    (job / "both-new").write_text("pod's")
    (job / "same").write_text("equal")
    (job / "folder").mkdir()
    (job / "folder/inner").write_text("pod's")
    (job / "replaced").unlink()
    (job / "replaced").symlink_to("pod's")
    time.sleep(0.01)  # the clock of the files' stamps ticks in milliseconds
    for name in ("file", "deleted", "both-new", "folder", "replaced"):
        _changed_by_host(place.job / name, "host's")
    _changed_by_host(place.job / "same", "equal")
    report = _write_back(pod)
    assert report.conflicts == {
        "file": "file" + _BESIDE,
        "both-new": "both-new" + _BESIDE,
        "replaced": "replaced" + _BESIDE,
        "folder": "folder" + _BESIDE,
        "deleted": "",
    }
    assert report.failed == {}
    for name in ("file", "deleted", "both-new", "folder", "replaced"):
        assert (place.job / name).read_text() == "host's"
    assert (place.job / ("file" + _BESIDE)).read_text() == "pod's"
    assert (place.job / ("folder" + _BESIDE) / "inner").read_text() == "pod's"
    assert (place.job / ("replaced" + _BESIDE)).readlink() == Path("pod's")
    assert (place.job / "same").read_text() == "equal"


def test_two_pods_with_the_same_name_lose_nothing(place: Bench) -> None:
    pods = [_start(place), _start(place)]
    for number, pod in enumerate(pods):
        (_inside(place, pod) / "log").write_text(f"pod {number}")
        (_inside(place, pod) / "same").write_text("equal")
        (_inside(place, pod) / f"own{number}").write_text("x")
    time.sleep(0.01)
    first, second = (_write_back(pod, pod_number=number) for number, pod in enumerate(pods))
    assert first.conflicts == {}
    assert second.conflicts == {"log": "log.moorage-j1-1"}
    assert (place.job / "log").read_text() == "pod 0"
    assert (place.job / "log.moorage-j1-1").read_text() == "pod 1"
    assert _names(place.job) == ["log", "log.moorage-j1-1", "own0", "own1", "same"]


def test_kinds_that_changed_are_replaced(place: Bench) -> None:
    (place.job / "to-folder").write_text("x")
    (place.job / "to-file").mkdir()
    (place.job / "to-file/in").write_text("x")
    (place.job / "to-link").mkdir()
    pod = _start(place)
    job = _inside(place, pod)
    (job / "to-folder").unlink()
    (job / "to-folder").mkdir()
    (job / "to-folder/in").write_text("y")
    (job / "to-file/in").unlink()
    (job / "to-file").rmdir()
    (job / "to-file").write_text("y")
    (job / "to-link").rmdir()
    (job / "to-link").symlink_to("y")
    assert _write_back(pod).conflicts == {}
    assert _names(place.job) == ["to-file", "to-folder", "to-folder/in", "to-link"]
    assert (place.job / "to-file").read_text() == "y"


def test_a_renamed_folder_arrives_whole(place: Bench) -> None:
    (place.job / "one/deep").mkdir(parents=True)
    (place.job / "one/deep/file").write_text("below")
    pod = _start(place)
    (_inside(place, pod) / "one").rename(_inside(place, pod) / "two")
    (_inside(place, pod) / "two/more").write_text("x")
    _write_back(pod)
    assert _names(place.job) == ["two", "two/deep", "two/deep/file", "two/more"]
    assert (place.job / "two/deep/file").read_text() == "below"


def test_folders_that_changed_names_with_each_other_keep_their_contents(place: Bench) -> None:
    for name in ("a", "b", "c"):
        (place.job / name / "sub").mkdir(parents=True)
        (place.job / name / "sub/file").write_text(f"once in {name}")
        (place.job / name / "link").symlink_to(name)
    pod = _start(place)
    job = _inside(place, pod)
    (job / "a").rename(job / "aside")
    (job / "b").rename(job / "a")
    (job / "c").rename(job / "b")
    (job / "aside").rename(job / "c")
    assert _write_back(pod).conflicts == {}
    for name, before in (("a", "b"), ("b", "c"), ("c", "a")):
        assert (place.job / name / "sub/file").read_text() == f"once in {before}"
        assert (place.job / name / "link").readlink() == Path(before)


def test_an_emptied_folder_is_emptied_but_for_what_the_host_added(place: Bench) -> None:
    (place.job / "out/deep").mkdir(parents=True)
    (place.job / "out/deep/old").write_text("x")
    (place.job / "out/other").write_text("x")
    pod = _start(place)
    job = _inside(place, pod)
    (job / "out/deep/old").unlink()
    (job / "out/deep").rmdir()
    (job / "out/other").unlink()
    (job / "out").rmdir()
    (job / "out").mkdir()
    (job / "out/new").write_text("x")
    time.sleep(0.01)
    _changed_by_host(place.job / "out/deep/hosts", "keep")
    report = _write_back(pod)
    assert report.conflicts == {"out/deep": ""}
    assert _names(place.job) == ["out", "out/deep", "out/deep/hosts", "out/new"]


@pytest.mark.parametrize("made_by", ["host", "pod"])
def test_symlinks_lead_nowhere(place: Bench, made_by: str) -> None:
    victim = place.top / "victim"
    victim.mkdir()
    os.chown(victim, _UID, _GID)  # the owner could write there, so only the refusal of links protects it
    (victim / "file").write_text("precious")
    os.chown(victim / "file", _UID, _GID)
    (place.job / "folder").mkdir()
    (place.job / "folder/gone").write_text("x")
    pod = _start(place)
    job = _inside(place, pod)
    if made_by == "pod":
        (job / "link").symlink_to(victim)
        (job / "file").symlink_to(victim / "file")
        _write_back(pod)
        assert (place.job / "link").is_symlink()
        assert (place.job / "file").is_symlink()
    else:
        (job / "folder/new").write_text("pod's")
        (job / "folder/file").write_text("pod's")
        (job / "folder/gone").unlink()
        (place.job / "folder/gone").unlink()
        (place.job / "folder").rmdir()
        (place.job / "folder").symlink_to(victim)
        report = _write_back(pod)
        assert report.conflicts["folder"] == "folder" + _BESIDE
        assert (place.job / ("folder" + _BESIDE) / "file").read_text() == "pod's"
    assert _names(victim) == ["file"]
    assert (victim / "file").read_text() == "precious"


def test_a_temporary_name_that_is_a_link_is_not_written_through(place: Bench) -> None:
    victim = place.top / "victim"
    victim.write_text("precious")
    pod = _start(place)
    (_inside(place, pod) / "file").write_text("pod's")
    (place.job / ".moorage-j1-0.tmp").symlink_to(victim)
    assert _write_back(pod).written == ["file"]
    assert victim.read_text() == "precious"
    assert _names(place.job) == ["file"]


def test_a_mount_of_the_host_is_neither_filled_nor_emptied(place: Bench) -> None:
    (place.job / "data").mkdir()
    (place.job / "gone").mkdir()
    for name in ("data", "gone"):
        mount("tmpfs", place.job / name, "tmpfs", 0, "size=1m,mode=777")
        (place.job / name / "precious").write_text("x")
    pod = _start(place)
    job = _inside(place, pod)
    assert list((job / "gone").iterdir()) == []  # a pod does not see the host's mounts
    (job / "gone").rmdir()
    (job / "data/result").write_text("x")
    report = _write_back(pod)
    assert report.failed == {"data/result": "a mount of the host lies there"}
    assert report.conflicts == {"gone": ""}
    assert (place.job / "gone/precious").exists()
    assert _names(place.job / "data") == ["precious"]


def test_what_the_owner_may_not_write_is_reported(place: Bench) -> None:
    (place.job / "roots").mkdir()
    pod = _start(place)
    os.chown(place.job / "roots", 0, 0)
    (_inside(place, pod) / "roots/file").write_text("x")
    (_inside(place, pod) / "fine").write_text("x")
    report = _write_back(pod)
    assert report.written == ["fine"]
    assert report.failed == {"roots/file": "Permission denied"}


def test_special_files_are_skipped_and_odd_names_survive(place: Bench) -> None:
    pod = _start(place)
    job = _inside(place, pod)
    os.mkfifo(job / "fifo")
    (job / os.fsdecode(b"odd\xff\n")).write_text("x")
    report = _write_back(pod)
    assert report.skipped == ["fifo"]
    assert report.written == ["odd\\xff\n"]
    assert [os.fsencode(path.name) for path in place.job.iterdir()] == [b"odd\xff\n"]


def test_sparse_results_stay_sparse(place: Bench) -> None:
    pod = _start(place)
    with (_inside(place, pod) / "sparse").open("wb") as file:
        file.truncate(100 << 20)
        file.seek(50 << 20)
        file.write(b"x" * 100_000)
    with (_inside(place, pod) / "hole").open("wb") as file:
        file.truncate(100 << 20)
    _write_back(pod)
    assert (place.job / "sparse").stat().st_size == 100 << 20
    assert (place.job / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (place.job / "hole").stat().st_blocks * 512 < 1 << 20


def test_folders_that_are_hidden_from_the_pod_are_never_deleted(place: Bench) -> None:
    (place.job / ".moorage").mkdir()
    (place.job / ".moorage/store").write_text("precious")
    pod = place.start(image=None, working_directory=str(place.job), hidden=[place.job / ".moorage"])
    assert not (_inside(place, pod) / ".moorage").exists()
    assert list(pod.changed_below()) == []
    (_inside(place, pod) / ".moorage").mkdir()
    (_inside(place, pod) / ".moorage/store").write_text("pod's")
    assert list(pod.changed_below()) == []
    assert _write_back(pod) == WriteBack()
    assert (place.job / ".moorage/store").read_text() == "precious"


def test_what_moorage_put_there_is_no_result_and_the_root_has_none(place: Bench) -> None:
    pod = _start(place)
    pod.put(f"{place.job}/resolv.conf", b"nameserver 10.0.0.1")
    (_inside(place, pod) / "result").write_text("x")
    assert _write_back(PodLayers.load(pod.folder)).written == ["result"]
    root = place.start(image=None, working_directory="/")
    (root.root / "moorage-test-result").write_text("x")
    assert root.write_back(uid=0, gid=0, job="j1", pod=0) == WriteBack()
    assert not Path("/moorage-test-result").exists()


def test_results_go_to_another_folder_and_to_none(place: Bench) -> None:
    pod = _start(place)
    (_inside(place, pod) / "file").write_text("x")
    (place.top / "results").mkdir()
    os.chown(place.top / "results", _UID, _GID)
    assert _write_back(pod, place.top / "results").written == ["file"]
    assert _names(place.job) == []
    with pytest.raises(NotFound, match="no folder"):
        _write_back(pod, place.top / "absent")
    (place.top / "closed").mkdir(mode=0o700)
    with pytest.raises(MoorageError, match="as user 4321"):
        _write_back(pod, place.top / "closed")


def test_the_start_is_that_of_the_first_incarnation(place: Bench) -> None:
    (place.job / "file").write_text("before")
    pod = _start(place)
    (_inside(place, pod) / "file").write_text("pod's")
    time.sleep(0.01)
    _changed_by_host(place.job / "file", "host's")
    tree, index, _ = place.capture(pod)
    moved, _ = place.restore(tree, index, image=None)
    assert _write_back(moved).conflicts == {"file": "file" + _BESIDE}


def test_a_thread_has_the_owners_rights_only_within_the_block(place: Bench) -> None:
    secret = place.top / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    groups = os.getgroups()
    with acting_as(Owner(_UID, _GID, (77,))), pytest.raises(PermissionError):
        secret.read_text()
    assert secret.read_text() == "x"
    assert os.getgroups() == groups
    team = place.top / "team"
    team.write_text("x")
    os.chown(team, 0, 77)
    team.chmod(0o040)
    with acting_as(Owner(_UID, _GID, (77,))):
        assert team.read_text() == "x"
