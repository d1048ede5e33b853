"""The worker's end of a guard's socket, against a server that says nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moorage.errors import Unavailable
from moorage.worker.guard.client import GuardClient
from moorage.worker.guard.messages import SOCKET_FILE


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def test_whoever_is_cancelled_while_it_closes_is_cancelled(tmp_path: Path) -> None:
    async def test() -> None:
        async with await asyncio.start_unix_server(_silent, tmp_path / SOCKET_FILE):
            client = await GuardClient.connect(tmp_path)
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)  # it waits for the listener's end now
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing

    asyncio.run(test())


def test_a_call_that_waits_is_told_when_the_connection_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        async with await asyncio.start_unix_server(_silent, tmp_path / SOCKET_FILE):
            client = await GuardClient.connect(tmp_path)
            asking = asyncio.create_task(client.status())
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(Unavailable):
                await asking
            with pytest.raises(Unavailable):
                await client.status()

    asyncio.run(test())
