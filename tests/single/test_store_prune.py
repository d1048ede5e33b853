"""Prune on a real file system, and processes that are killed at every step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import (
    Fenced,
    NotFound,
)
from moorage.store import Store
from tests.support.store_files import CHILD, MIB, all_files, checkpoint, child, images, noise, packs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """3 MiB of noise, 2 MiB of zeros, text, and an odd end."""
    path = tmp_path / "pages-1.img"
    path.write_bytes(noise(3 * MIB, 1) + bytes(2 * MIB) + b"all work and no play " * 100_000 + noise(12345, 2))
    return path


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
