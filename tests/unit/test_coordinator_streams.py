"""Streams of the API that are given up in the middle of a step: by the end of the leader's term, or by the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from moorage.coordinator.leader import Leader
from moorage.errors import Unavailable


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
