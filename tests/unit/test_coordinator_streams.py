"""Streams of the API that are given up in the middle of a step: by the end of the leader's term, or by the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from moorage.coordinator import logs
from moorage.coordinator.bell import Bell
from moorage.coordinator.leader import Leader
from moorage.errors import NotFound, Unavailable
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
