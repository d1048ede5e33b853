"""A coordinator that is started again ends the lease of the one that died, and of nobody who may be alive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.barrier.session import Session
from moorage.coordinator.predecessor import Predecessor
from tests.support.etcd import Etcd

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def test_the_lease_of_a_dead_predecessor_is_ended_and_that_of_a_living_one_is_not(etcd: Etcd, tmp_path: Path) -> None:
    async def test() -> None:
        async with etcd.client() as client, Session.open(client, 60) as session:
            await client.put("leader", b"me", lease=session.lease)
            with Predecessor(tmp_path, "c") as first:
                first.succeed(session.lease)
                with Predecessor(tmp_path, "c") as second:  # the first one still holds the lock
                    await second.bury(client)
                    second.succeed(1)
                with Predecessor(tmp_path, "another cluster") as other:
                    await other.bury(client)
                assert await client.get("leader") is not None
            with Predecessor(tmp_path, "c") as successor:
                await successor.bury(client)
            assert await client.get("leader") is None

    asyncio.run(test())


def test_without_a_folder_or_with_nonsense_in_it_every_lease_runs_out_by_itself(etcd: Etcd, tmp_path: Path) -> None:
    async def test() -> None:
        async with etcd.client() as client:
            (tmp_path / "file").touch()
            with Predecessor(tmp_path / "file" / "below", "c") as nowhere:
                await nowhere.bury(client)
                nowhere.succeed(1)
            (tmp_path / "coordinator-c.lock").write_text("no lease\n")
            with Predecessor(tmp_path, "c") as predecessor:
                await predecessor.bury(client)
                predecessor.succeed(0xABC)
            assert (tmp_path / "coordinator-c.lock").read_text().split() == ["abc"]

    asyncio.run(test())
