"""Writers, readers, prunes and crashes, interleaved at random, against a model: no committed checkpoint loses a byte.

The machine plays the coordinator as well: it raises the generation, reads what is committed, prunes, and commits an
attempt only if the generation did not rise since the attempt's start, or after `Store.confirm`. Hosts are separate
`Store` objects on one folder; time is logical; a crash stops a host at any single operation on the storage, and nothing
that the dying code still tries to clean up has an effect.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moorage import failpoints
from moorage.errors import CorruptData, MoorageError, NotFound
from moorage.store import Content, GlobalManifest, PodManifest, Store, Writer, config, packs, writer
from moorage.store.keys import StoreKey
from moorage.store.posix import PosixBackend
from tests.support.store_world import HostBackend, InlineExecutor, Killed, World

BLOCKS = [bytes([i + 1]) + random.Random(i).randbytes(4095) for i in range(5)]
BLOCK_LISTS = st.lists(st.integers(0, len(BLOCKS) - 1), min_size=1, max_size=4)
HOSTS = 3
STEPS = "claim copy condemn barrier index delete record"
POINTS = [f"store.{name}.{when}" for name in ("index", "pack") for when in ("before", "after")]
POINTS += [f"store.prune.{step}.{when}" for step in STEPS.split() for when in ("before", "after")]


def crashes(most: int) -> st.SearchStrategy[int | None]:
    """After how many operations the host dies: mostly never."""
    return st.one_of(st.none(), st.none(), st.none(), st.integers(0, most))


def joined(blocks: list[int]) -> bytes:
    return b"".join(BLOCKS[block] for block in blocks)


class Attempt:
    """One attempt: a writer on a host, then a pod manifest, then the commit."""

    def __init__(self, number: int, host: int, generation: int, start: int, writer: Writer) -> None:
        self.number = number
        self.host = host
        self.generation = generation
        self.start = start
        self.writer = writer
        self.contents: dict[str, Content] = {}
        self.blocks: list[list[int]] = []
        self.manifest = ""
        self.sheltered = True  # nothing happened that may cost it its data


class StoreMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.generation = 0
        self.number = 0
        self.committed: dict[str, list[list[int]]] = {}
        self.running: list[Attempt] = []
        self.stores: list[Store] = []
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(failpoints, "hit_sync", self.world.hit)
        self.patches.setattr(packs, "PACK_SIZE", 7_000)
        self.patches.setattr(writer, "_COARSE", 2 * 4096)  # so that two blocks and more are patched
        self.patches.setattr(packs, "ThreadPoolExecutor", InlineExecutor)
        self.patches.setattr(StoreKey, "random", lambda encrypted=False: StoreKey(bytes(32)))

    @initialize()
    def hosts(self) -> None:
        config.create(PosixBackend(self.world.folder))
        self.stores = [self.fresh_store() for _ in range(HOSTS)]

    def fresh_store(self) -> Store:
        backend = HostBackend(self.world)
        return Store(backend, *config.load(backend), self.world.leases)

    def reboot(self, host: int) -> None:
        """The host is dead: its attempts are lost, its leases stay until they expire, its memory is gone."""
        alive = dict(self.world.leases.alive)
        for attempt in [a for a in self.running if a.host == host]:
            self.running.remove(attempt)
            with contextlib.suppress(Killed):
                attempt.writer.abort()  # ends its threads; has no effect on the dead host's storage
        self.world.leases.alive = alive
        self.stores[host] = self.fresh_store()

    # Attempts

    @rule(host=st.integers(0, HOSTS - 1), blocks=BLOCK_LISTS, commit=st.booleans())
    def checkpoint(self, host: int, blocks: list[int], commit: bool) -> None:
        """A whole attempt, but for the commit perhaps."""
        self.begin(host)
        attempt = self.running[-1]
        self.add_to(attempt, blocks)
        self.persist_now(attempt)
        if commit:
            self.commit_now(attempt)

    @rule(host=st.integers(0, HOSTS - 1))
    def begin(self, host: int) -> None:
        self.number += 1
        generation, start = self.generation, self.world.tick()
        found = self.stores[host].writer(label=f"attempt {self.number}", threads=1, nice=0)
        self.running.append(Attempt(self.number, host, generation, start, found))

    @precondition(lambda self: any(not a.manifest for a in self.running))
    @rule(data=st.data(), blocks=BLOCK_LISTS)
    def add(self, data: st.DataObject, blocks: list[int]) -> None:
        attempt = data.draw(st.sampled_from([a for a in self.running if not a.manifest]))
        self.add_to(attempt, blocks)

    def add_to(self, attempt: Attempt, blocks: list[int]) -> None:
        attempt.contents[str(len(attempt.contents))] = attempt.writer.add_bytes(joined(blocks))
        attempt.blocks.append(blocks)

    @precondition(lambda self: any(not a.manifest for a in self.running))
    @rule(data=st.data(), crash=crashes(25), meanwhile=st.booleans())
    def persist(self, data: st.DataObject, crash: int | None, meanwhile: bool) -> None:
        attempt = data.draw(st.sampled_from([a for a in self.running if not a.manifest]))
        backend = self.stores[attempt.host].backend
        assert isinstance(backend, HostBackend)
        if meanwhile:
            self.interrupt(data, ("store.index.before", "store.index.after", "store.pack.before"))
        backend.left = -1 if crash is None else crash
        try:
            self.persist_now(attempt)
        except Killed:
            self.reboot(attempt.host)
        else:
            backend.left = -1
        finally:
            self.world.interrupts.clear()

    def persist_now(self, attempt: Attempt) -> None:
        attempt.writer.finish()
        attempt.manifest = self.stores[attempt.host].write_pod_manifest(
            PodManifest(
                job="j", owner="o", pod=0, incarnation=1, attempt=attempt.number, node="n", created=0.0,
                images=attempt.contents,
            )
        )  # fmt: skip
        attempt.writer.abort()  # gives the lease back

    @precondition(lambda self: any(a.manifest for a in self.running))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_now(data.draw(st.sampled_from([a for a in self.running if a.manifest])))

    def commit_now(self, attempt: Attempt) -> None:
        store = self.stores[0]
        self.running.remove(attempt)
        try:
            name = store.write_global_manifest(
                GlobalManifest(
                    job="j", owner="o", attempt=attempt.number, incarnation=1, created=0.0, pods=[attempt.manifest]
                )
            )
            if self.generation != attempt.generation:
                seen = self.generation
                store.confirm(name)
                if seen != self.generation:
                    return  # the transaction's comparison fails
        except (NotFound, CorruptData) as error:
            assert not attempt.sheltered, f"attempt {attempt.number} lost its data: {error}"
            return
        self.committed[name] = attempt.blocks
        self.look()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.running))
        self.running.remove(attempt)
        attempt.writer.abort()

    @precondition(lambda self: self.world.leases.alive)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """A host is stopped for longer than its lease, and later goes on."""
        lease = data.draw(st.sampled_from(sorted(self.world.leases.alive)))
        del self.world.leases.alive[lease]
        for attempt in self.running:
            if attempt.writer.lease_id == lease:
                attempt.sheltered = False

    # Prune and restore

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        del self.committed[data.draw(st.sampled_from(sorted(self.committed)))]

    @rule(data=st.data(), host=st.integers(0, HOSTS - 1), careful=st.booleans())
    def prune_beside_others(self, data: st.DataObject, host: int, careful: bool) -> None:
        self.interrupt(data, POINTS)
        self.prune(host, careful, None)

    @rule(host=st.integers(0, HOSTS - 1), careful=st.booleans(), crash=crashes(60))
    def prune(self, host: int, careful: bool, crash: int | None) -> None:
        backend = self.stores[host].backend
        assert isinstance(backend, HostBackend)
        backend.left = -1 if crash is None else crash
        try:
            self.prune_now(self.stores[host], careful)
        except Killed:
            self.reboot(host)
        else:
            backend.left = -1
        finally:
            self.world.interrupts.clear()
        self.look()

    def prune_now(self, store: Store, careful: bool) -> None:
        """``careful``: what running attempts wrote is protected by its age, so prune must not cost them anything."""
        known = store.condemned()
        self.generation += 1
        mine = self.generation
        protect = self.world.time
        if careful:
            protect = min([a.start for a in self.running], default=protect) - 1
        else:
            for attempt in self.running:
                attempt.sheltered = False
        try:
            store.prune(list(self.committed), generation=mine, protect_after=protect, condemned=known)
        except MoorageError:
            assert self.generation > mine, "a prune that nobody overtook must not fail"
            for attempt in self.running:
                attempt.sheltered = False

    def interrupt(self, data: st.DataObject, points: Sequence[str]) -> None:
        """Do something else, on another host, when the next operation comes to one of some failpoints."""
        for point in data.draw(st.lists(st.sampled_from(points), min_size=1, max_size=3, unique=True)):
            action = data.draw(st.sampled_from(["checkpoint", "finish", "finish", "prune", "careful prune", "forget"]))
            self.world.interrupts[point] = self.interruption(action, data.draw(BLOCK_LISTS))

    def interruption(self, action: str, blocks: list[int]) -> Callable[[], None]:
        def act() -> None:
            later = self.world.interrupts
            self.world.interrupts = {}
            self.stores.append(self.fresh_store())
            self.meanwhile(action, len(self.stores) - 1, blocks)
            self.world.interrupts = later

        return act

    def meanwhile(self, action: str, host: int, blocks: list[int]) -> None:
        if action == "checkpoint":
            self.checkpoint(host, blocks, True)
        elif action == "finish":
            for attempt in [a for a in self.running if a.manifest]:
                self.commit_now(attempt)
        elif action == "forget" and self.committed:
            del self.committed[min(self.committed)]
        elif action.endswith("prune"):
            self.prune_now(self.stores[host], action.startswith("careful"))

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), host=st.integers(0, HOSTS - 1), forgotten=st.booleans())
    def restore(self, data: st.DataObject, host: int, forgotten: bool) -> None:
        """A restore that has begun ends well, even if the checkpoint is forgotten and pruned meanwhile."""
        name = data.draw(st.sampled_from(sorted(self.committed)))
        blocks = self.committed[name]
        store = self.stores[host]
        with store.protect(name, label="restore") as manifest:
            if forgotten:
                del self.committed[name]
            for _ in range(3):
                self.prune_now(self.stores[(host + 1) % HOSTS], careful=False)
            self.compare(store, manifest, blocks)
        self.look()

    def compare(self, store: Store, manifest: GlobalManifest, blocks: list[list[int]]) -> None:
        found = store.read_pod_manifest(manifest.pods[0])
        assert [store.read_bytes(found.images[str(i)]) for i in range(len(blocks))] == [joined(b) for b in blocks]

    def look(self) -> None:
        """Every committed checkpoint is whole, for one who has just come and for one who has been here long."""
        for store in (self.fresh_store(), self.stores[1]):
            for name, blocks in self.committed.items():
                self.compare(store, store.read_global_manifest(name), blocks)

    def teardown(self) -> None:
        try:
            if self.stores:
                self.look()
                self.world.leases.alive.clear()
                self.running.clear()
                self.committed.clear()
                store = self.fresh_store()
                for _ in range(3):
                    self.prune_now(store, careful=False)
                left = [str(p.relative_to(self.world.folder)) for p in self.world.folder.rglob("*") if p.is_file()]
                assert sorted(x.partition("/")[0] for x in left) == ["config", "keys", "prunes"], left
        finally:
            self.patches.undo()
            shutil.rmtree(self.world.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MOORAGE_STORE_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_no_committed_checkpoint_is_ever_lost = pytest.mark.timeout(300)(StoreMachine.TestCase)
