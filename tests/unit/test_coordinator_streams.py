"""Streams of the API that are given up in the middle of a step: by the end of the leader's term, or by the caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moorage.barrier.kv import KeyValue, Listing, Put, WatchBatch
from moorage.coordinator import events, logs
from moorage.coordinator.bell import Bell
from moorage.coordinator.leader import Leader
from moorage.errors import NotFound, Unavailable
from moorage.records import Event, Keys
from moorage.v1.worker_pb2 import LogChunk
from tests.unit.test_coordinator_parts import export, frame


class Source:
    """Yields once, then waits for ever; notes that it was ended in an orderly way."""

    def __init__(self) -> None:
        self.closed = False

    async def read(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            # A step of its own while it is being ended, as a watch of etcd needs one.
            await asyncio.sleep(0)
            self.closed = True


def leader() -> Leader:
    made = object.__new__(Leader)
    made._over = asyncio.Event()
    return made


def test_a_stream_ends_with_the_term_even_in_the_middle_of_a_step() -> None:
    async def run() -> None:
        source, leads = Source(), leader()
        stream = leads.streaming(source.read())
        assert await anext(stream) == 1
        asyncio.get_running_loop().call_soon(leads._over.set)
        with pytest.raises(Unavailable, match="leads no more"):
            await anext(stream)
        assert source.closed

    asyncio.run(run())


def test_a_stream_whose_caller_goes_away_in_the_middle_of_a_step_closes_its_source() -> None:
    async def run() -> None:
        source, leads = Source(), leader()
        stream = leads.streaming(source.read())
        assert await anext(stream) == 1
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert source.closed

    asyncio.run(run())


def test_the_log_of_a_job_that_is_just_ending_waits_for_the_archive() -> None:
    archive = export(frame(0, 1, b"the last line\n"))

    class Workers:
        asked = 0

        async def replies(self, *_: object) -> AsyncIterator[LogChunk]:
            self.asked += 1
            if self.asked == 1:
                yield LogChunk(data=b"so far\n")
            raise NotFound("the pod is being removed")

    def found(name: str) -> bytes:
        if name != "logs/j/1/0":
            raise NotFound(name)
        return archive

    def state(phase: str) -> SimpleNamespace:
        over = phase == "finished"
        return SimpleNamespace(
            phase=phase, over=over, seats=() if over else (SimpleNamespace(node="n"),), bringup=None,
            incarnation=2 if over else 1, origin="", base="", latest="",
        )  # fmt: skip

    async def run() -> None:
        job = SimpleNamespace(id="j", changed=Bell(), state=state("running"))
        leader = SimpleNamespace(workers=Workers(), store=SimpleNamespace(get_object=found))

        def end() -> None:
            job.state = state("finished")
            job.changed.ring()

        asyncio.get_running_loop().call_later(0.05, end)
        reader = logs._Reader(leader, job, 0, -1, 0, 0)  # type: ignore[arg-type]
        assert [chunk.data async for chunk in reader.now()] == [b"so far\n", b"the last line\n"]

    asyncio.run(run())


class Events:
    """Etcd's side of a job's events: what is listed first, then what `write` puts."""

    def __init__(self) -> None:
        self._written: asyncio.Queue[WatchBatch] = asyncio.Queue()
        self._revision = 1
        self.keys = Keys("c")
        self.listed: tuple[KeyValue, ...] = ()
        self.watched = asyncio.Event()
        self.closed = False

    def kv(self, number: int, job: str = "j", moment: float = 0.0) -> KeyValue:
        self._revision += 1
        event = Event(time=moment, kind="k", sentence=f"{job} {number}", job=job, owner="o")
        key = f"{self.keys.events(job)}{number:010d}"
        return KeyValue(key, msgspec.json.encode(event), self._revision, self._revision, 1)

    def write(self, number: int, job: str = "j", moment: float = 0.0) -> None:
        self._written.put_nowait(WatchBatch(self._revision, (Put(self.kv(number, job, moment)),)))

    async def list(self, prefix: str, **_: object) -> Listing:
        return Listing(self._revision, tuple(kv for kv in self.listed if kv.key.startswith(prefix)))

    async def watch(self, prefix: str, *, since: int) -> AsyncIterator[WatchBatch]:
        self.watched.set()
        try:
            while True:
                yield await self._written.get()
        finally:
            await asyncio.sleep(0)
            self.closed = True


def event_source(etcd: Events, *jobs: str) -> tuple[Any, Any]:
    found = {job: SimpleNamespace(id=job, changed=Bell(), state=SimpleNamespace(over=False, said=1)) for job in jobs}
    return SimpleNamespace(etcd=etcd, keys=etcd.keys, jobs=found), found[jobs[0]]


@pytest.mark.parametrize("shown_by", ["watch", "list"])
def test_the_events_of_a_job_end_with_it_also_when_etcd_shows_the_last_one_first(shown_by: str) -> None:
    """Etcd has the last event before the coordinator knows that its write succeeded; nothing comes after it."""

    async def run() -> None:
        etcd = Events()
        leader, job = event_source(etcd, "j")
        etcd.listed = (etcd.kv(0),) + ((etcd.kv(1),) if shown_by == "list" else ())
        stream = aiter(events.read(leader, job, follow=True))
        assert (await anext(stream)).sentence == "j 0"
        if shown_by == "watch":
            etcd.write(1)
        assert (await anext(stream)).sentence == "j 1"
        last = asyncio.ensure_future(anext(stream, None))
        await etcd.watched.wait()
        job.changed.ring()  # something else happened: the stream goes on waiting
        for _ in range(10):
            await asyncio.sleep(0)
        assert not last.done()
        job.state = SimpleNamespace(over=True, said=2, phase="finished")
        job.changed.ring()
        async with asyncio.timeout(30):
            assert await last is None
        assert etcd.closed

    asyncio.run(run())


def test_the_events_of_a_job_that_somebody_brings_back_go_on() -> None:
    async def run() -> None:
        etcd = Events()
        leader, job = event_source(etcd, "j")
        etcd.listed = (etcd.kv(0),)
        keeper = SimpleNamespace(keeper="its Ray driver")
        job.state = SimpleNamespace(over=True, said=1, phase="failed", policy=keeper, ended=time.time())
        stream = aiter(events.read(leader, job, follow=True))
        assert (await anext(stream)).sentence == "j 0"
        back = asyncio.ensure_future(anext(stream))
        await etcd.watched.wait()
        job.state = SimpleNamespace(over=False, said=2)
        etcd.write(1)
        assert (await back).sentence == "j 1"
        job.state = SimpleNamespace(over=True, said=2, phase="failed", policy=keeper, ended=time.time() - 3600)
        job.changed.ring()
        async with asyncio.timeout(30):
            assert await anext(stream, None) is None

    asyncio.run(run())


def test_the_events_of_a_job_go_on_to_the_last_one_after_the_job_is_over() -> None:
    async def run() -> None:
        etcd = Events()
        leader, job = event_source(etcd, "j")
        etcd.listed = (etcd.kv(0),)
        stream = aiter(events.read(leader, job, follow=True))
        assert (await anext(stream)).sentence == "j 0"
        last = asyncio.ensure_future(anext(stream))
        await etcd.watched.wait()
        job.state = SimpleNamespace(over=True, said=2, phase="finished")
        job.changed.ring()
        etcd.write(1)
        async with asyncio.timeout(30):
            assert (await last).sentence == "j 1"
            assert await anext(stream, None) is None

    asyncio.run(run())


def test_of_all_jobs_events_none_is_lost_because_another_is_newer() -> None:
    async def run() -> None:
        etcd = Events()
        leader, _ = event_source(etcd, "j", "k")
        etcd.listed = (etcd.kv(0, "k", 9.0), etcd.kv(0, "j", 2.0))
        stream = aiter(events.read(leader, None, follow=True))
        assert [(await anext(stream)).sentence for _ in range(2)] == ["j 0", "k 0"]
        etcd.write(0, "k", 9.0)  # it is in the list already
        etcd.write(1, "j", 3.0)
        etcd.write(1, "k", 4.0)
        async with asyncio.timeout(30):
            assert [(await anext(stream)).sentence for _ in range(2)] == ["j 1", "k 1"]

    asyncio.run(run())
