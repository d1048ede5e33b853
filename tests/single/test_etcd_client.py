"""The client against a real etcd: lost requests and answers, restarts, dead members, TLS, users."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.errors import NotFound, Unavailable
from tests.support.etcd import Etcd
from tests.support.proxy import Proxy

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def port_of(etcd: Etcd, index: int = 0) -> int:
    return int(etcd.endpoints[index].rpartition(":")[2])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that only polling shows."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_keys_are_written_read_listed_and_deleted(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            assert await client.get("/basic/a") is None
            revision = await client.put("/basic/a", b"1")
            found = await client.get("/basic/a")
            assert found is not None
            assert (found.value, found.create_revision, found.version) == (b"1", revision, 1)
            await client.put("/basic/ä", b"2")
            listing = await client.list("/basic/")
            assert [kv.key for kv in listing.items] == ["/basic/a", "/basic/ä"]
            assert listing.revision == revision + 1
            assert await client.delete("/basic/a")
            assert not await client.delete("/basic/a")
            assert await client.delete_prefix("/basic/") == 1
            assert (await client.list("/basic/")).items == ()

    asyncio.run(main())


def test_a_long_listing_is_read_in_pages_at_one_revision(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            for start in range(0, 2500, 100):
                await client.txn([], [op.put(f"/pages/{n:05d}", b"x") for n in range(start, start + 100)])
            listing = await client.list("/pages/")
            assert [kv.key for kv in listing.items] == [f"/pages/{n:05d}" for n in range(2500)]
            keys = await client.list("/pages/", keys_only=True, limit=1200)
            assert len(keys.items) == 1200
            assert keys.items[0].value == b""

    asyncio.run(main())


def test_a_transaction_takes_one_branch_and_returns_its_gets(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            first = await client.txn([cmp.absent("/t/a")], [op.put("/t/a", b"1")], [op.get("/t/a")])
            assert first.succeeded
            second = await client.txn([cmp.absent("/t/a")], [op.put("/t/a", b"2")], [op.get("/t/a"), op.get("/t/b")])
            assert not second.succeeded
            assert second.gets[0] is not None
            assert second.gets[0].value == b"1"
            assert second.gets[1] is None
            conditions = [
                cmp.exists("/t/a"),
                cmp.value("/t/a", b"1"),
                cmp.mod_revision("/t/a", first.revision),
                cmp.create_revision("/t/a", first.revision),
                cmp.mod_revision("/t/b", 0),
            ]
            assert (await client.txn(conditions, [op.delete_prefix("/t/")])).succeeded
            for condition in conditions[:-1]:
                assert not (await client.txn([condition], [])).succeeded

    asyncio.run(main())


def test_a_put_whose_answer_is_lost_is_found_by_reading(etcd: Etcd) -> None:
    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client, etcd.client() as direct:
            await client.get("/lost/put")
            proxy.lose_answers = True
            task = asyncio.create_task(client.put("/lost/put", b"1"))

            async def there() -> bool:
                return await direct.get("/lost/put") is not None

            await until(there)
            proxy.cut()
            revision = await task
            found = await direct.get("/lost/put")
            assert found is not None
            assert (found.mod_revision, found.version) == (revision, 1)

    asyncio.run(main())


def test_a_put_whose_request_is_lost_has_an_unknown_outcome_and_is_not_sent_again(etcd: Etcd) -> None:
    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client, etcd.client() as direct:
            await client.get("/lost/request")
            proxy.lose_requests = True
            task = asyncio.create_task(client.put("/lost/request", b"1"))
            await proxy.requests_lost.wait()
            proxy.cut()
            with pytest.raises(Unavailable, match="outcome unknown"):
                await task
            assert await direct.get("/lost/request") is None

    asyncio.run(main())


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_self_fencing_transaction_is_executed_once_whatever_is_lost(etcd: Etcd, lost: str) -> None:
    key, other = f"/lost/txn/{lost}", f"/lost/txn/{lost}/other"

    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client, etcd.client() as direct:
            await client.get(key)
            proxy.lose_answers, proxy.lose_requests = lost == "answer", lost == "request"
            create = client.txn([cmp.absent(key)], [op.put(key, b"1"), op.put(other, b"2")], [op.get(key)])
            task = asyncio.create_task(create)

            async def done() -> bool:
                return proxy.requests_lost.is_set() or await direct.get(key) is not None

            await until(done)
            proxy.cut()
            result = await task
            found = await direct.get(key)
            assert found is not None
            assert result.succeeded
            assert (found.version, found.mod_revision) == (1, result.revision)

    asyncio.run(main())


def test_a_self_fencing_transaction_that_another_overtook_is_told_so(etcd: Etcd) -> None:
    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client, etcd.client() as direct:
            await client.get("/overtaken")
            proxy.lose_requests = True
            create = client.txn([cmp.absent("/overtaken")], [op.put("/overtaken", b"mine")], [op.get("/overtaken")])
            task = asyncio.create_task(create)
            await proxy.requests_lost.wait()
            await direct.put("/overtaken", b"theirs")
            proxy.cut()
            result = await task
            assert not result.succeeded
            assert [kv.value for kv in result.gets if kv] == [b"theirs"]

    asyncio.run(main())


def test_a_transaction_that_does_not_fence_itself_has_an_unknown_outcome(etcd: Etcd) -> None:
    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client:
            await client.get("/unfenced")
            proxy.lose_requests = True
            task = asyncio.create_task(client.txn([], [op.put("/unfenced", b"1")]))
            await proxy.requests_lost.wait()
            proxy.cut()
            with pytest.raises(Unavailable, match="outcome unknown"):
                await task

    asyncio.run(main())


def test_a_lease_whose_grant_was_answered_to_nobody_is_kept(etcd: Etcd) -> None:
    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client:
            await client.get("/lease")
            proxy.lose_answers = True
            task = asyncio.create_task(client.lease_grant(30))
            # How far etcd is cannot be seen from outside before the id is known; either way the grant must come out.
            await asyncio.sleep(0.2)
            proxy.cut()
            lease, ttl = await task
            assert 0 < ttl <= 30
            await client.put("/lease", b"", lease=lease)
            await client.lease_revoke(lease)
            await client.lease_revoke(lease)
            assert await client.get("/lease") is None
            assert await client.lease_keepalive(lease) == 0
            with pytest.raises(NotFound):
                await client.put("/lease", b"", lease=lease)

    asyncio.run(main())


def test_calls_that_were_never_sent_wait_for_etcd_to_come_back() -> None:
    async def main() -> None:
        with Etcd() as etcd:
            async with etcd.client(timeout=20) as client:
                await client.put("/a", b"1")
                etcd.kill_member()
                get = asyncio.create_task(client.get("/a"))
                put = asyncio.create_task(client.put("/b", b"2"))
                txn = asyncio.create_task(client.txn([cmp.absent("/c")], [op.put("/c", b"")]))
                # They fail to connect meanwhile.
                await asyncio.to_thread(etcd.start_member)
                got, revision, result = await asyncio.gather(get, put, txn)
                assert got is not None
                assert got.value == b"1"
                assert revision > 0
                assert result.succeeded

    asyncio.run(main())


def test_an_endpoint_that_swallows_everything_costs_nothing_but_itself(etcd: Etcd) -> None:
    async def main() -> None:
        with socket.socket() as hole:  # the kernel accepts connections, and nobody ever answers
            hole.bind(("127.0.0.1", 0))
            hole.listen()
            dead = f"127.0.0.1:{hole.getsockname()[1]}"
            for _ in range(4):  # the order of the endpoints is random
                async with etcd.client(endpoints=[dead, etcd.endpoints[0]]) as client:
                    await client.put("/hole", b"1")
                    assert await client.get("/hole") is not None

    asyncio.run(main())


def test_a_connection_that_dies_in_silence_moves_reads_to_another_endpoint(etcd: Etcd) -> None:
    async def main() -> None:
        async with (
            Proxy(port_of(etcd)) as one,
            Proxy(port_of(etcd)) as two,
            EtcdClient([one.endpoint, two.endpoint], timeout=2) as client,
        ):
            await client.put("/silent", b"1")
            for proxy in (one, two):
                proxy.lose_requests = proxy.lose_answers = True
                assert await client.get("/silent") is not None
                proxy.cut()

    asyncio.run(main())


def test_three_members_lose_their_leader_and_every_write_is_accounted_for() -> None:
    async def main() -> None:
        with Etcd(members=3) as etcd:
            async with etcd.client(timeout=8) as client:
                for turn in range(12):
                    if turn == 4:
                        leader = etcd.leader()
                        etcd.kill_member(leader)
                    key = f"/three/{turn:02d}"
                    result = await client.txn([cmp.absent(key)], [op.put(key, b"x")])
                    assert result.succeeded
                etcd.start_member(leader)
                with etcd.paused(etcd.leader()):
                    result = await client.txn([cmp.absent("/three/12")], [op.put("/three/12", b"x")])
                    assert result.succeeded
                assert [kv.version for kv in (await client.list("/three/")).items] == [1] * 13

    asyncio.run(main())


def test_closing_ends_what_waits_with_an_error_and_not_with_a_cancellation(etcd: Etcd) -> None:
    async def main() -> None:
        client = etcd.client()
        await client.put("/close", b"")

        async def watch() -> None:
            async for _ in client.watch("/close", since=1 << 40):
                pass

        async with Proxy(port_of(etcd)) as proxy:
            stuck = EtcdClient([proxy.endpoint])
            await stuck.get("/close")
            proxy.lose_requests = True
            waiting = [asyncio.create_task(watch()), asyncio.create_task(stuck.get("/close"))]
            await proxy.requests_lost.wait()
            await client.close()
            await stuck.close()
            for task in waiting:
                with pytest.raises(Unavailable, match="closed"):
                    await task
            with pytest.raises(Unavailable, match="closed"):
                await client.get("/close")

    asyncio.run(main())
