"""The committed checkpoints: listing, retention, pins, what is inside, verification, prune."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import cmp, op
from moorage.coordinator import uploads
from moorage.coordinator.bell import Bell
from moorage.coordinator.machine.state import job_of
from moorage.coordinator.persist import compare_generation
from moorage.errors import Conflict, CorruptData, MoorageError, NotFound, Unavailable
from moorage.records import CheckpointRecord
from moorage.store import CheckResult, GlobalManifest, PodManifest, PruneResult, Store, forget, missing_is_damage
from moorage.store.manifests import image_kind

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

failpoints.declare(
    *(
        f"coordinator.{what}.{side}"
        for what in ("checkpoint.forget", "checkpoint.pin", "prune.generation")
        for side in ("before", "after")
    )
)

#: How often the store is pruned in the background, and how long after start the first time, in seconds.
PRUNE_EVERY = 900.0
#: What was written so recently is left alone by a prune, in seconds.
PROTECT = 600.0
_LOOK_SECONDS = 5.0


DEVICE = "device memory"


class Part(NamedTuple):
    """One kind of data of one pod: plain bytes, bytes that it takes in the store, number of files."""

    pod: int
    kind: str
    bytes: int
    stored: int
    items: int


def kind_of(kind: str, name: str) -> str:
    """What a user calls a content of a pod's manifest."""
    if kind == "images":
        return image_kind(name)
    return {"layer": "files", "journal": "logs", "memory": DEVICE}.get(kind, kind)


def device_parts(whole: Part, gpu: dict[str, Any]) -> list[Part]:
    """Device memory by what it cost, and what the driver itself put into the processes' memory.

    ``gpu``: as the manifest has it; what an earlier release wrote does not say how much was new.
    """
    new, shared, same = (int(gpu.get(f"bytes_{what}", 0)) for what in ("new", "shared", "same"))
    driver = int(gpu.get("driver_bytes", 0))
    processes = len(gpu.get("processes", []))
    found = [whole]
    if new + shared + same == whole.bytes:
        fresh = min(whole.stored, round(whole.stored * new / max(1, new + shared)))
        found = [
            whole._replace(kind=f"{DEVICE}, new", bytes=new, stored=fresh),
            whole._replace(kind=f"{DEVICE}, as in earlier checkpoints", bytes=shared, stored=whole.stored - fresh),
            whole._replace(kind=f"{DEVICE}, zeros and repeated", bytes=same, stored=0),
        ]
    if driver:
        found.append(Part(whole.pod, "CUDA context (within process memory)", driver, 0, processes))
    return found


def _parts(store: Store, pods: list[PodManifest]) -> list[Part]:
    store.index.refresh()
    met: set[bytes] = set()
    found: list[Part] = []
    for manifest in pods:
        totals: dict[str, list[int]] = {}
        for kind, name, content in manifest.contents():
            total = totals.setdefault(kind_of(kind, name), [0, 0, 0])
            fresh = {chunk.name for chunk in content.chunks if chunk.name} - met
            met |= fresh
            total[0] += content.size
            total[1] += sum(place.stored for name in fresh if (place := store.index.locate(name)))
            total[2] += 1
        parts = [Part(manifest.pod, kind, *total) for kind, total in sorted(totals.items())]
        for part in parts:
            found += device_parts(part, manifest.extra.get("gpu", {})) if part.kind == DEVICE else [part]
    return found


async def _release(taken: asyncio.Future[GlobalManifest], holding: contextlib.AbstractContextManager[Any]) -> None:
    """Give back what is held as soon as it is held; nothing to do if it could not be taken."""
    with contextlib.suppress(MoorageError, OSError):
        await taken
        await asyncio.to_thread(holding.__exit__, None, None, None)


def _in_the_way(kept: list[CheckpointRecord], error: MoorageError) -> MoorageError:
    """What keeps a prune from knowing what is needed, by the checkpoint's name if it is one."""
    for record in kept:
        if record.manifest and record.manifest in error.message:
            return CorruptData(
                f"nothing was pruned: checkpoint {record.checkpoint} is damaged ({error.message})",
                "put that file back from a copy; or let the checkpoint go with its job, once that is over: "
                f"moorage delete {record.job}",
            )
    return error


class Checkpoints:
    """All checkpoints of the cluster, as etcd holds them."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._pruning = asyncio.Lock()
        self._forgotten = 0  # since the last prune
        self._releasing: set[asyncio.Task[None]] = set()
        self.committed = Bell()
        self.pinning = asyncio.Lock()  # held while a job goes with its checkpoints: none of them is pinned meanwhile

    async def of_job(self, job: str) -> list[CheckpointRecord]:
        """Oldest first. Raises `Unavailable`."""
        listing = await self._leader.etcd.list(self._leader.keys.checkpoints(job))
        found = [msgspec.json.decode(kv.value, type=CheckpointRecord) for kv in listing.items]
        return sorted(found, key=lambda record: record.attempt)

    async def all(self) -> list[CheckpointRecord]:
        """Of all jobs, by job and age. Raises `Unavailable`."""
        return [record for job in sorted(self._leader.jobs) for record in await self.of_job(job)]

    async def get(self, checkpoint: str) -> CheckpointRecord:
        """Raises `NotFound`, `Unavailable`."""
        job = job_of(checkpoint)
        kv = await self._leader.etcd.get(self._leader.keys.checkpoint(job, checkpoint)) if job else None
        if kv is None:
            raise NotFound(f"no checkpoint {checkpoint!r}", "moorage checkpoints lists all of them")
        return msgspec.json.decode(kv.value, type=CheckpointRecord)

    async def pod_manifests(self, checkpoint: str) -> list[str]:
        """Names of its pods' manifests in the store, pod 0 first. Raises `NotFound`, `CorruptData`, `Unavailable`."""
        record = await self.get(checkpoint)
        if record.pods:
            return record.pods
        with missing_is_damage():
            manifest = await asyncio.to_thread(self._leader.store.read_global_manifest, record.manifest)
        return manifest.pods

    @contextlib.asynccontextmanager
    async def protected(self, checkpoint: str) -> AsyncIterator[list[str]]:
        """Within the block no prune deletes anything of the checkpoint, even if it is forgotten meanwhile.

        Gives the names of its pods' manifests in the store, pod 0 first. Raises `NotFound`, `CorruptData`,
        `Unavailable`.
        """
        record = await self.get(checkpoint)
        if record.pods:
            yield record.pods  # what has no global manifest yet is kept from prune by name
            return
        holding = self._leader.store.protect(record.manifest, label=f"restore of {checkpoint}")
        taken = asyncio.ensure_future(asyncio.to_thread(holding.__enter__))
        try:
            with missing_is_damage():
                names = (await asyncio.shield(taken)).pods
            yield names
        finally:
            # Not awaited: whoever cancels a restore is not to wait for the store.
            task = asyncio.create_task(_release(taken, holding))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def sound(self, checkpoint: str) -> None:
        """Raises `CorruptData` if something that the checkpoint needs is not in the store; no data is read."""
        record = await self.get(checkpoint)
        if record.pods:
            return  # not in the store yet: the nodes have it
        with missing_is_damage():
            result = await asyncio.to_thread(self._leader.store.check, record.manifest, read_data=False)
        if result.problems:
            raise CorruptData(
                f"checkpoint {checkpoint} is damaged: {result.problems[0]}",
                f"restore another one: moorage checkpoints {record.job}",
            )

    async def in_store(self, checkpoint: str) -> CheckpointRecord:
        """The record of a checkpoint of which all is in the store. Raises `NotFound`, `Unavailable`."""
        record = await self.get(checkpoint)
        if record.pods:
            nodes = ", ".join(sorted(set(record.nodes)))
            raise Unavailable(
                f"checkpoint {checkpoint} is not in the store yet: it is being uploaded from {nodes}",
                f"moorage show {checkpoint} says how far it is",
            )
        return record

    async def uploaded(self, record: CheckpointRecord) -> tuple[int, int]:
        """How many pods of a checkpoint that waits are in the store, and how many are not; 0 and 0 for others."""
        if not record.pods:
            return 0, 0
        looking = asyncio.to_thread(uploads.missing, self._leader.store, record)
        try:
            absent = len(await asyncio.wait_for(looking, _LOOK_SECONDS))
        except (TimeoutError, MoorageError):
            absent = len(record.pods)  # the store does not say
        return len(record.pods) - absent, absent

    async def read(self, checkpoint: str) -> tuple[CheckpointRecord, GlobalManifest, list[PodManifest]]:
        """The record and all manifests. Raises `NotFound`, `CorruptData`, `Unavailable`."""
        record = await self.in_store(checkpoint)
        store = self._leader.store

        def manifests() -> tuple[GlobalManifest, list[PodManifest]]:
            with missing_is_damage():
                whole = store.read_global_manifest(record.manifest)
                return whole, [store.read_pod_manifest(name) for name in whole.pods]

        whole, pods = await asyncio.to_thread(manifests)
        return record, whole, pods

    async def parts(self, pods: list[PodManifest]) -> list[Part]:
        """What is inside, by pod and kind. A chunk that several share is counted as stored where it is met first."""
        return await asyncio.to_thread(_parts, self._leader.store, pods)

    async def pin(self, checkpoint: str, *, pinned: bool) -> CheckpointRecord:
        """Keep it whatever the retention says, or no longer. Raises `NotFound`, `Unavailable`."""
        async with self.pinning:
            return await self._pin(checkpoint, pinned=pinned)

    async def _pin(self, checkpoint: str, *, pinned: bool) -> CheckpointRecord:
        leader = self._leader
        key = leader.keys.checkpoint(job_of(checkpoint), checkpoint)
        while True:
            kv = await leader.etcd.get(key) if job_of(checkpoint) else None
            if kv is None:
                raise NotFound(f"no checkpoint {checkpoint!r}", "moorage checkpoints lists all of them")
            record = msgspec.json.decode(kv.value, type=CheckpointRecord)
            new = msgspec.structs.replace(record, pinned=pinned)
            await failpoints.hit("coordinator.checkpoint.pin.before")
            fence = [leader.leadership.compare(), cmp.mod_revision(key, kv.mod_revision)]
            result = await leader.etcd.txn(fence, [op.put(key, msgspec.json.encode(new))])
            await failpoints.hit("coordinator.checkpoint.pin.after")
            if result.succeeded:
                return new
            await leader.verify()

    async def check(self, checkpoint: str, *, read_data: bool) -> AsyncIterator[tuple[int, int] | CheckResult]:
        """Verify it: progress ``(bytes done, bytes in all)``, at last the result. Raises `NotFound`, `Unavailable`."""
        record = await self.in_store(checkpoint)
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(news.put_nowait, (done, total))

        def work() -> CheckResult:
            try:
                with missing_is_damage():
                    return self._leader.store.check(record.manifest, read_data=read_data, progress=progress)
            finally:
                loop.call_soon_threadsafe(news.put_nowait, None)

        checking = asyncio.create_task(asyncio.to_thread(work))
        while (item := await news.get()) is not None:
            yield item
        yield await checking

    # -- what goes on by itself

    def forgotten(self, count: int) -> None:
        """So many were forgotten with their job: what they needed is there for the next prune."""
        self._forgotten += count

    async def after_commit(self, job: Job) -> None:
        """Forget what the retention does not keep, and the keys of old attempts. Failures are tried again next time."""
        try:
            await self._forget(job)
            await self._forget_attempts(job)
        except MoorageError as error:
            log.warning("retention failed", job=job.id, error=str(error))

    async def _forget(self, job: Job) -> None:
        leader = self._leader
        state = job.state
        needed = {state.latest, state.base, state.origin, state.bringup.checkpoint if state.bringup else ""}
        for record in forget(await self.of_job(job.id), state.policy.keep_last):
            if record.checkpoint in needed:
                continue
            key = leader.keys.checkpoint(job.id, record.checkpoint)
            await failpoints.hit("coordinator.checkpoint.forget.before")
            await leader.etcd.txn([leader.leadership.compare()], [op.delete(key)])
            await failpoints.hit("coordinator.checkpoint.forget.after")
            self._forgotten += 1
            log.info("checkpoint forgotten", job=job.id, checkpoint=record.checkpoint)

    async def _forget_attempts(self, job: Job) -> None:
        """Remove the keys of attempts that nobody can still act on: all but the newest two."""
        leader = self._leader
        prefix = leader.keys.attempts(job.id)
        listing = await leader.etcd.list(prefix, keys_only=True)
        numbers = {int(kv.key.removeprefix(prefix).partition("/")[0]) for kv in listing.items}
        for number in sorted(numbers):
            if number < job.state.attempts - 1:
                try:
                    await job.persistence.attempts.forget(number)
                except Conflict:
                    # Its outcome was never needed: the pods were killed. Nobody may create one any more.
                    await leader.etcd.txn(
                        [leader.leadership.compare()], [op.delete_prefix(leader.keys.attempt(job.id, number))]
                    )

    async def housekeeping(self) -> None:
        """Prune now and then, when something was forgotten; never ends by itself."""
        while True:
            await asyncio.sleep(PRUNE_EVERY)
            if not self._forgotten:
                continue
            try:
                await self.prune(dry_run=False)
            except MoorageError as error:
                log.warning("prune failed", error=str(error))

    async def prune(self, *, dry_run: bool) -> tuple[list[CheckpointRecord], PruneResult]:
        """Remove from the store what no checkpoint needs; returns the checkpoints that are kept, and what was done.

        Raises `Fenced`, `CorruptData` (what is needed cannot be told, for a checkpoint is damaged), `Unavailable`.
        """
        async with self._pruning:
            # Before the generation is raised: what only a prune of that generation condemned may still be needed.
            condemned = await asyncio.to_thread(self._leader.store.condemned)
            generation = await self._leader.read_generation()
            if not dry_run:
                generation = await self._raise_generation(generation)
            # Read after the generation was raised: whatever is committed later compares the new one and is confirmed.
            kept = await self.all()
            # What is still being uploaded has no manifest to keep yet; the uploads' leases protect it.
            names = {record.manifest for record in kept if not record.pods}
            forgotten = self._forgotten
            try:
                result = await asyncio.to_thread(
                    self._leader.store.prune,
                    names,
                    generation=generation,
                    protect_after=time.time() - PROTECT,
                    dry_run=dry_run,
                    condemned=condemned,
                    keep_pods={pod for record in kept for pod in record.pods},
                )
            except (NotFound, CorruptData) as error:
                raise _in_the_way(kept, error) from error
            if not dry_run:
                self._forgotten -= forgotten
                log.info("pruned", generation=generation, kept=len(kept), freed=result.bytes_freed)
            return kept, result

    async def _raise_generation(self, current: int) -> int:
        leader = self._leader
        while True:
            await failpoints.hit("coordinator.prune.generation.before")
            fence = [leader.leadership.compare(), compare_generation(leader.keys, current)]
            value = str(current + 1).encode()
            result = await leader.etcd.txn(fence, [op.put(leader.keys.store_generation, value)])
            await failpoints.hit("coordinator.prune.generation.after")
            if result.succeeded:
                return current + 1
            await leader.verify()
            current = await leader.read_generation()
