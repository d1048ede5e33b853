"""When a capture or a restore fails it says why in one line and leaves nothing half-done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.errors import Conflict, CorruptData, NewerVersion, NoCapacity
from moorage.store.manifests import Content
from moorage.worker.layers import PodLayers, decode_tree
from moorage.worker.layers.syscalls import mount
from moorage.worker.layers.tree import encode_tree
from tests.support.layers import Bench, bench, picture

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Bench]:
    with bench() as made:
        yield made


def _small_disk(place: Bench, name: str) -> Path:
    disk = place.top / name
    disk.mkdir()
    mount("tmpfs", disk, "tmpfs", 0, "size=2m")
    return disk


@pytest.mark.parametrize("sizes", [[5 << 20], [200_000] * 20])
def test_no_space_for_the_copy(place: Bench, sizes: list[int]) -> None:
    pod = place.start()
    for number, size in enumerate(sizes):
        (pod.root / f"job/{number}").write_bytes(os.urandom(size))
    before = picture(pod._layers[0].upper, overlay=True)
    disk = _small_disk(place, "staging-disk")
    with pytest.raises(NoCapacity, match="no space in"):
        pod.capture(disk, None)
    assert list(disk.iterdir()) == []
    assert picture(pod._layers[0].upper, overlay=True) == before
    tree, index, _ = place.capture(pod)
    assert picture(place.restore(tree, index)[0].root) == picture(pod.root)


def test_no_space_for_the_restored_files(place: Bench) -> None:
    pod = place.start()
    for number in range(20):
        (pod.root / f"job/{number}").write_bytes(os.urandom(300_000))
    tree, index, _ = place.capture(pod)
    folder = _small_disk(place, "state") / "pod"
    layers = PodLayers.from_tree(folder, tree, image=place.image)
    with pytest.raises(NoCapacity, match="no space in"):
        layers.restore(tree, index.contents, place.store.fetch)
    assert {path.name for path in folder.iterdir()} == {"layers.json", "upper", "work", "merged"}
    assert list((folder / "upper").iterdir()) == []


def test_a_fetch_that_fails_leaves_an_empty_upper(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/first").write_bytes(b"x" * 10)
    (pod.root / "job/second").write_bytes(b"x" * 500_000)
    tree, index, _ = place.capture(pod)
    layers = PodLayers.from_tree(place.top / "pod7", tree, image=place.image)

    def broken(content: Content, path: Path) -> None:
        if content.size > 1000:
            raise CorruptData("chunk does not match its name")
        place.store.fetch(content, path)

    with pytest.raises(CorruptData, match="does not match"):
        layers.restore(tree, index.contents, broken)
    assert list((layers.folder / "upper").iterdir()) == []
    layers.restore(tree, index.contents, place.store.fetch)
    layers.mount()
    assert picture(layers.root) == picture(pod.root)


def test_a_content_that_is_too_short_is_corrupt_data(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/small").write_bytes(b"x" * 1000)
    (pod.root / "job/large").write_bytes(b"x" * 500_000)
    tree, index, _ = place.capture(pod)
    for number, limit in enumerate((1000, 500_000)):
        layers = PodLayers.from_tree(place.top / f"short{number}", tree, image=place.image)

        def short(content: Content, path: Path, limit: int = limit) -> None:
            place.store.fetch(content, path)
            if content.size == limit:
                os.truncate(path, limit - 1)

        with pytest.raises(CorruptData, match="shorter"):
            layers.restore(tree, index.contents, short)


def test_a_tree_without_its_contents_is_corrupt_data(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/file").write_bytes(b"x" * 1000)
    tree, index, _ = place.capture(pod)
    layers = PodLayers.from_tree(place.top / "pod7", tree, image=place.image)
    with pytest.raises(CorruptData, match="lacks the content"):
        layers.restore(tree, {}, place.store.fetch)
    (key,) = index.contents
    with pytest.raises(CorruptData, match="cut short"):
        layers.restore(tree, {key: Content(999, [])}, place.store.fetch)


def test_a_tree_that_was_altered_or_is_newer_is_refused(place: Bench) -> None:
    tree, _, _ = place.capture(place.start())
    with pytest.raises(CorruptData):
        PodLayers.from_tree(place.top / "pod7", tree[:-3], image=place.image)
    newer = encode_tree(msgspec.structs.replace(decode_tree(tree), version=99))
    with pytest.raises(NewerVersion):
        PodLayers.from_tree(place.top / "pod7", newer, image=place.image)


def test_an_upper_that_is_in_use_is_not_restored_over(place: Bench) -> None:
    pod = place.start()
    (pod.root / "job/file").write_bytes(b"x")
    tree, index, _ = place.capture(pod)
    with pytest.raises(Conflict, match="is mounted"):
        pod.restore(tree, index.contents, place.store.fetch)
    pod.unmount()
    with pytest.raises(Conflict, match="not empty"):
        pod.restore(tree, index.contents, place.store.fetch)
    assert (pod.folder / "upper/job/file").read_bytes() == b"x"


@pytest.mark.parametrize(
    "point", ["layers.capture.before", "layers.capture.after", "layers.restore.before", "layers.restore.after"]
)
def test_a_process_that_dies_in_between_can_be_followed_by_another(place: Bench, point: str) -> None:
    pod = place.start()
    (pod.root / "job/empty").touch()
    tree, index, _ = place.capture(pod)
    points = place.top / "failpoints"
    points.mkdir()
    (points / point).write_text("kill")
    (place.top / "tree").write_bytes(tree)
    program = """
import sys
from pathlib import Path
from moorage.worker.layers import PodLayers
top, image = Path(sys.argv[1]), Path(sys.argv[2])
if "capture" in sys.argv[3]:
    PodLayers.load(top / "pod1").capture(top / "staging", None)
else:
    tree = (top / "tree").read_bytes()
    PodLayers.from_tree(top / "pod8", tree, image=image).restore(tree, {}, lambda content, path: None)
"""
    command = [sys.executable, "-P", "-c", program, str(place.top), str(place.image), point]
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "MOORAGE_FAILPOINTS_DIR": str(points), "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, check=False)
    assert done.returncode == -9
    (pod.root / "job/file").write_bytes(b"x" * 1000)
    tree, index, _ = place.capture(pod)
    layers = PodLayers.from_tree(place.top / "pod8", tree, image=place.image)
    layers.restore(tree, index.contents, place.store.fetch)
    layers.mount()
    assert picture(layers.root) == picture(pod.root)


def test_results_that_were_cut_short_are_completed_by_doing_it_again(place: Bench) -> None:
    (place.job / "moved/deep").mkdir(parents=True)
    (place.job / "moved/deep/file").write_text("below")
    pod = place.start(image=None, working_directory=str(place.job))
    job = pod.root / str(place.job)[1:]
    (job / "moved").rename(job / "new")
    for number in range(5):
        (job / f"file{number}").write_text(str(number))
    points = place.top / "failpoints"
    points.mkdir()
    program = """
import sys
from pathlib import Path
from moorage.worker.layers import PodLayers
PodLayers.load(Path(sys.argv[1])).write_back(uid=0, gid=0, job="j", pod=0)
"""
    command = [sys.executable, "-P", "-c", program, str(pod.folder)]
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "MOORAGE_FAILPOINTS_DIR": str(points), "PYTHONPATH": str(source)}
    for point in ("layers.writeback.before", "layers.writeback.file", "layers.writeback.after"):
        (points / point).write_text("kill")
        assert subprocess.run(command, env=environment, check=False).returncode == -9
    report = pod.write_back(uid=0, gid=0, job="j", pod=0)
    assert report.conflicts == report.failed == {}
    assert (place.job / "new/deep/file").read_text() == "below"
    assert not (place.job / "moved").exists()
    assert sorted(path.name for path in place.job.iterdir()) == [*(f"file{number}" for number in range(5)), "new"]
