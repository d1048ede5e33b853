"""The node's registration: under its lease, again after it was lost, and never a deadline without it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from moorage.barrier import clock
from moorage.errors import Unavailable
from moorage.records import Keys, NodeRecord
from moorage.worker.agent_session import Registration
from tests.support.etcd import Etcd

pytestmark = pytest.mark.root
KEYS = Keys("session-test")


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as made:
        yield made


def _record(cpus: int = 1) -> NodeRecord:
    return NodeRecord(
        node="n",
        address="a",
        endpoint="a:1",
        session="s",
        pid=1,
        version="0",
        lease_seconds=2,
        cpus=cpus,
        memory_bytes=1,
    )


def test_the_node_registers_after_it_looked_at_etcd_and_only_then_promises_a_deadline(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            story: list[str] = []
            registration = Registration(client, KEYS, 2)

            async def on_session() -> None:
                assert await client.get(KEYS.node("n")) is None
                with pytest.raises(Unavailable, match="no session"):
                    registration.require()
                story.append("looked")

            def on_deadline(deadline: float) -> None:
                assert clock.now() < deadline <= clock.now() + 2
                story.append("promised")

            running = asyncio.create_task(registration.run(_record, on_session=on_session, on_deadline=on_deadline))
            await asyncio.wait_for(registration.first.wait(), 10)
            found = await client.get(KEYS.node("n"))
            assert found is not None
            assert found.lease
            assert msgspec.json.decode(found.value, type=NodeRecord) == _record()
            assert story[:2] == ["looked", "promised"]
            registration.require()
            await registration.update(_record(cpus=4))
            found = await client.get(KEYS.node("n"))
            assert found is not None
            assert msgspec.json.decode(found.value, type=NodeRecord).cpus == 4
            await registration.revoke()
            await running
            assert await client.get(KEYS.node("n")) is None
            with pytest.raises(Unavailable):
                registration.require()

    asyncio.run(main())


def test_a_lease_that_is_gone_is_followed_by_a_new_registration(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            sessions = 0
            registration = Registration(client, KEYS, 2)

            async def on_session() -> None:
                nonlocal sessions
                sessions += 1

            running = asyncio.create_task(
                registration.run(_record, on_session=on_session, on_deadline=lambda deadline: None)
            )
            await asyncio.wait_for(registration.first.wait(), 10)
            found = await client.get(KEYS.node("n"))
            assert found is not None
            await client.lease_revoke(found.lease)
            assert await client.get(KEYS.node("n")) is None
            async with asyncio.timeout(15):
                async for batch in client.watch(KEYS.node("n"), since=1):
                    found = await client.get(KEYS.node("n"))
                    if batch.events and found is not None and sessions == 2:
                        break
            assert registration.alive
            await registration.revoke()
            await running

    asyncio.run(main())


def test_a_session_in_which_etcd_could_not_be_looked_at_does_not_register(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            promised: list[float] = []
            tries = 0
            registration = Registration(client, KEYS, 2)

            async def on_session() -> None:
                nonlocal tries
                tries += 1
                if tries == 1:
                    assert not promised
                    raise Unavailable("etcd is away")

            running = asyncio.create_task(registration.run(_record, on_session=on_session, on_deadline=promised.append))
            await asyncio.wait_for(registration.first.wait(), 10)
            assert tries == 2
            await registration.revoke()
            await running

    asyncio.run(main())
