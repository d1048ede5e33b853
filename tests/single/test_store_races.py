"""Prune beside others, one meeting after the other: the orders of events that the random machine seldom hits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moorage import failpoints
from moorage.errors import CorruptData, Fenced, NotFound
from moorage.store import GlobalManifest, PodManifest, PruneResult, Store, Writer, packs

At = Callable[[str, Callable[[], object]], None]
DATA = [random.Random(seed).randbytes(200_000) for seed in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def other(store: Store) -> Store:
    """Another host's view."""
    found = Store.open(store.location)
    found.index.refresh()
    return found


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """``at(point, act)``: do something once, when the code comes to a failpoint."""
    due: dict[str, Callable[[], object]] = {}

    def hit(name: str) -> None:
        if (act := due.pop(name, None)) is not None:
            act()

    monkeypatch.setattr(failpoints, "hit_sync", hit)
    return due.__setitem__


def manifest(store: Store, writer: Writer, *data: bytes, attempt: int = 1) -> str:
    """Finish the writer with ``data``, and give its lease back; returns the pod manifest's name."""
    images = {str(i): writer.add_bytes(item) for i, item in enumerate(data)}
    writer.finish()
    name = store.write_pod_manifest(
        PodManifest(job="j", owner="o", pod=0, incarnation=1, attempt=attempt, node="n", created=1.0, images=images)
    )
    writer.abort()
    return name


def seal(store: Store, pod: str) -> str:
    return store.write_global_manifest(
        GlobalManifest(job="j", owner="o", attempt=1, incarnation=1, created=2.0, pods=[pod])
    )


def checkpoint(store: Store, *data: bytes, attempt: int = 1) -> str:
    return seal(store, manifest(store, store.writer(label="test"), *data, attempt=attempt))


def prune(store: Store, generation: int, *keep: str, careful: bool = False) -> PruneResult:
    """Not ``careful``: nothing is protected by its age."""
    protect = time.time() + (-3600 if careful else 60)
    return store.prune(keep, generation=generation, protect_after=protect, condemned=store.condemned())


def whole(store: Store, name: str) -> bool:
    return Store.open(store.location).check(name, read_data=True).ok and store.check(name, read_data=True).ok


def stopped_prune(at: At, point: str, run: Callable[[], object]) -> Callable[[], None]:
    """Start a prune that stops at ``point``; what is returned lets it go on and waits for its end."""
    stopped, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        assert go_on.wait(60)

    at(point, stop)
    thread = threading.Thread(target=run)
    thread.start()
    assert stopped.wait(60)

    def resume() -> None:
        go_on.set()
        thread.join()

    return resume


def test_condemned_chunks_are_stored_anew(store: Store, other: Store) -> None:
    checkpoint(store, DATA[0])
    other.index.refresh()
    prune(store, 1)
    for host, new in ((other, len(DATA[0])), (store, 0)):  # the second finds what the first has stored anew
        with host.writer(label="w") as writer:
            writer.add_bytes(DATA[0])
            assert writer.finish().bytes_new == new


def test_a_writer_that_reused_what_is_condemned_meanwhile_keeps_it(store: Store, other: Store) -> None:
    checkpoint(store, DATA[0])
    writer = other.writer(label="w")
    writer.add_bytes(DATA[0])
    for generation in (1, 2, 3):
        assert prune(store, generation).packs_deleted == 0
    name = seal(other, manifest(other, writer, DATA[0], attempt=2))
    other.confirm(name)
    for generation in (4, 5):
        prune(store, generation, name)
    assert whole(store, name)


def test_what_was_confirmed_survives_a_prune_that_is_already_deleting(store: Store, other: Store, at: At) -> None:
    checkpoint(store, DATA[0])
    writer = other.writer(label="w")
    writer.add_bytes(DATA[0])
    prune(store, 1)
    Path(store.location, "leases", writer.lease_id).unlink()  # stopped for too long: prune does not wait for it
    committed = []

    def commit() -> None:
        committed.append(seal(other, manifest(other, writer, DATA[0], attempt=2)))
        other.confirm(committed[0])

    at("store.prune.delete.before", commit)
    assert prune(store, 2).packs_deleted > 0
    assert whole(store, committed[0])
    for generation in (3, 4):
        prune(store, generation, *committed)
    assert whole(store, committed[0])


def test_a_manifest_that_is_committed_while_it_is_condemned_stays(store: Store, other: Store, at: At) -> None:
    pod = manifest(other, other.writer(label="w"), DATA[0])
    committed = []

    def commit() -> None:
        committed.append(seal(other, pod))
        other.confirm(committed[0])

    at("store.prune.condemn.before", commit)
    assert prune(store, 1).manifests_condemned == 1
    for generation in (2, 3):
        prune(store, generation, *committed)
    assert whole(store, committed[0])


def test_what_is_condemned_cannot_be_confirmed(store: Store, other: Store) -> None:
    name = checkpoint(other, DATA[0])
    prune(store, 1)
    with pytest.raises(CorruptData, match="about to be deleted"):
        other.confirm(name)
    prune(store, 2)
    with pytest.raises(CorruptData) as caught:
        other.confirm(name)
    assert "new checkpoint" in caught.value.hint


def test_an_attempt_is_not_hurt_by_careful_prunes(store: Store, other: Store) -> None:
    checkpoint(store, DATA[0], DATA[1])
    writer = other.writer(label="w")
    writer.add_bytes(DATA[0])
    prune(store, 1, careful=True)
    pod = manifest(other, writer, DATA[0], DATA[2], attempt=2)
    prune(store, 2, careful=True)
    name = seal(other, pod)
    prune(store, 3, careful=True)
    other.confirm(name)
    assert whole(store, name)


def test_packs_of_a_running_writer_are_not_garbage(store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_SIZE", 1000)
    writer = other.writer(label="w")
    writer.add_bytes(DATA[0])
    for generation in (1, 2, 3):
        assert prune(store, generation).packs_condemned == 0
    name = seal(other, manifest(other, writer, DATA[1]))
    assert whole(store, name)


def test_packs_of_a_dead_writer_are(store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_SIZE", 1000)
    writer = other.writer(label="w")
    writer.add_bytes(DATA[0])
    Path(store.location, "leases", writer.lease_id).unlink()
    assert prune(store, 1).packs_condemned > 0
    assert prune(store, 2).packs_deleted > 0
    # It wakes up and finishes: its index names a pack that is gone, and nobody believes it.
    late = seal(other, manifest(other, writer, DATA[1], DATA[0]))
    with pytest.raises(CorruptData):
        other.confirm(late)
    fresh = Store.open(store.location)
    for host in (store, fresh):
        name = checkpoint(host, DATA[0], attempt=2)
        assert whole(host, name)
    for generation in (3, 4):
        prune(store, generation, name)
    assert whole(store, name)
    assert Store.open(store.location).index.missing == frozenset()


@pytest.mark.parametrize("point", ["store.prune.claim.after", "store.prune.condemn.before"])
def test_a_prune_that_is_overtaken_gives_up(store: Store, other: Store, at: At, point: str) -> None:
    checkpoint(store, DATA[0])
    prune(store, 1)
    checkpoint(store, DATA[1], attempt=2)
    kept: list[str] = []

    def overtake() -> None:
        kept.append(checkpoint(other, DATA[0], DATA[1], attempt=3))
        prune(other, 3, *kept)

    at(point, overtake)
    with pytest.raises(Fenced):
        prune(store, 2)
    assert whole(store, kept[0])


def test_a_prune_that_condemns_late_does_not_hurt_what_was_committed_before(store: Store, other: Store, at: At) -> None:
    """The first prune stops just before it writes its record; the second was told what was condemned before."""
    checkpoint(store, DATA[0])
    go_on = stopped_prune(at, "store.prune.condemn.before", lambda: prune(store, 1))
    known = other.condemned()  # and now the generation is raised to 2
    name = checkpoint(other, DATA[0], attempt=2)  # an attempt of generation 2, which commits without `confirm`
    at("store.prune.claim.before", go_on)
    third = Store.open(store.location)
    third.prune([], generation=2, protect_after=time.time() + 60, condemned=known)
    for generation in (3, 4):
        prune(third, generation, name)
    assert whole(third, name)


def test_a_restore_waits_for_a_prune_that_may_delete_its_checkpoint(store: Store, other: Store, at: At) -> None:
    kept, forgotten = checkpoint(store, DATA[0]), checkpoint(store, DATA[1], attempt=2)
    prune(store, 1, kept)
    go_on = stopped_prune(at, "store.prune.delete.before", lambda: prune(store, 2, kept))
    with other.protect(kept, label="restore"):
        pass  # that one is kept: no waiting
    missing = threading.Event()

    def restore() -> None:
        with pytest.raises(NotFound), other.protect(forgotten, label="restore"):
            pass
        missing.set()

    waiting = threading.Thread(target=restore)
    waiting.start()
    assert not missing.wait(0.3)
    go_on()
    assert missing.wait(60)
    waiting.join()
