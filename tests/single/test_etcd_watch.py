"""Watches against a real etcd: no event is lost, and what etcd itself has dropped is said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from moorage.barrier import op, watching
from moorage.barrier.client import EtcdClient
from moorage.barrier.kv import Deleted, Put, WatchBatch
from moorage.errors import Forbidden
from tests.support.etcd import Etcd
from tests.support.proxy import Proxy

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd(arguments=["--experimental-watch-progress-notify-interval=200ms"]) as running:
        yield running


def port_of(etcd: Etcd) -> int:
    return int(etcd.endpoints[0].rpartition(":")[2])


class Follower:
    """Watches a prefix in the background, and remembers."""

    def __init__(self, client: EtcdClient, prefix: str, since: int) -> None:
        self.batches: list[WatchBatch] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(client, prefix, since))

    async def _follow(self, client: EtcdClient, prefix: str, since: int) -> None:
        async with aclosing(client.watch(prefix, since=since)) as batches:
            async for batch in batches:
                self.batches.append(batch)
                self._news.set()

    def puts(self) -> list[tuple[str, bytes]]:
        return [(e.kv.key, e.kv.value) for batch in self.batches for e in batch.events if isinstance(e, Put)]

    def relisted(self) -> list[WatchBatch]:
        return [batch for batch in self.batches if batch.relisted is not None]

    async def until_seen(self, key: str) -> None:
        async with asyncio.timeout(20):
            while not any(key == seen for seen, _ in self.puts()):
                self._news.clear()
                await self._news.wait()

    async def until_relisted(self, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while len(self.relisted()) < times:
                self._news.clear()
                await self._news.wait()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def test_puts_and_deletes_are_told_in_order_from_the_revision_asked_for(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            before = await client.put("/order/a", b"before")
            since = await client.put("/order/a", b"1")
            await client.put("/elsewhere", b"")
            result = await client.txn([], [op.delete("/order/a"), op.put("/order/b", b"2")])
            follower = Follower(client, "/order/", since)
            await follower.until_seen("/order/b")
            events = [event for batch in follower.batches for event in batch.events]
            assert follower.batches[-1].revision == result.revision
            assert [(type(e), getattr(e, "key", "") or e.kv.key) for e in events] == [  # type: ignore[union-attr]
                (Put, "/order/a"),
                (Deleted, "/order/a"),
                (Put, "/order/b"),
            ]
            assert before < since
            await follower.stop()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_no_event_is_lost_or_told_twice_however_often_the_connection_is_cut(etcd: Etcd, seed: int) -> None:
    rng = random.Random(seed)
    prefix = f"/cut/{seed}/"

    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client, etcd.client() as direct:
            follower = Follower(client, prefix, (await direct.list(prefix)).revision + 1)
            for n in range(1500):
                await direct.put(f"{prefix}{n % 7}", str(n).encode())
                if rng.random() < 0.02:
                    proxy.cut()
            await direct.put(prefix + "end", b"")
            await follower.until_seen(prefix + "end")
            assert [value for _, value in follower.puts()][:-1] == [str(n).encode() for n in range(1500)]
            assert not follower.relisted()
            assert proxy.connections > 3, "the connection was never cut"
            await follower.stop()

    asyncio.run(main())


def test_a_watch_goes_on_after_etcd_was_killed_and_started_again() -> None:
    async def main() -> None:
        with Etcd() as etcd:
            async with etcd.client() as client:
                follower = Follower(client, "/restart/", await client.put("/restart/a", b""))
                await follower.until_seen("/restart/a")
                for key in ("/restart/b",):
                    await asyncio.to_thread(etcd.restart_member)
                    await client.put(key, b"")
                    await follower.until_seen(key)
                assert [key for key, _ in follower.puts()] == ["/restart/a", "/restart/b"]
                assert not follower.relisted()
                await follower.stop()

    asyncio.run(main())


def test_a_watch_that_slept_through_a_compaction_lists_again_and_says_so(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            since = await client.put("/compact/a", b"1")
            await client.put("/compact/b", b"2")
            last = await client.put("/compact/b", b"3")
            etcd.compact(last)
            follower = Follower(client, "/compact/", since)
            await follower.until_relisted()
            (batch,) = follower.batches
            assert batch.relisted is not None
            assert [(kv.key, kv.value) for kv in batch.relisted.items] == [("/compact/a", b"1"), ("/compact/b", b"3")]
            await client.put("/compact/c", b"4")
            await follower.until_seen("/compact/c")
            assert follower.puts() == [("/compact/c", b"4")]
            await follower.stop()

    asyncio.run(main())


def test_a_watch_cut_off_during_a_compaction_lists_again(etcd: Etcd) -> None:
    async def main() -> None:
        async with Proxy(port_of(etcd)) as proxy, EtcdClient([proxy.endpoint]) as client, etcd.client() as direct:
            follower = Follower(client, "/cutoff/", await direct.put("/cutoff/a", b""))
            await follower.until_seen("/cutoff/a")
            proxy.lose_answers = True
            await direct.put("/cutoff/b", b"1")
            etcd.compact(await direct.put("/cutoff/b", b"2"))
            proxy.cut()
            await follower.until_relisted()
            listing = follower.relisted()[0].relisted
            assert listing is not None
            assert [kv.value for kv in listing.items] == [b"", b"2"]
            await follower.stop()

    asyncio.run(main())


def test_a_backlog_larger_than_one_message_comes_whole(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            since = await client.put("/large/start", b"")
            for n in range(5):  # each transaction is near etcd's limit; etcd splits the backlog into fragments
                await client.txn([], [op.put(f"/large/{n}/{i}", bytes(120_000)) for i in range(10)])
            await client.put("/large/end", b"")
            follower = Follower(client, "/large/", since)
            await follower.until_seen("/large/end")
            assert len(follower.puts()) == 52
            for batch in follower.batches:
                last = [e for e in batch.events if isinstance(e, Put) and e.kv.mod_revision == batch.revision]
                assert len(last) in (1, 10), "a revision was torn apart"
            await follower.stop()

    asyncio.run(main())


def test_progress_moves_a_quiet_watch_past_a_compaction(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            since = (await client.list("/quiet/")).revision + 1
            for _ in range(3):
                last = await client.put("/noise", b"")
            async with aclosing(watching._stream(client, "/quiet/", since)) as stream, asyncio.timeout(20):
                async for batch in stream:
                    assert batch.events == ()
                    if batch.revision >= last:
                        break
            etcd.compact(last)
            follower = Follower(client, "/quiet/", batch.revision + 1)
            await client.put("/quiet/a", b"")
            await follower.until_seen("/quiet/a")
            assert not follower.relisted()
            await follower.stop()

    asyncio.run(main())


def test_an_etcd_that_lost_its_history_is_noticed() -> None:
    async def main() -> None:
        with Etcd() as etcd:
            async with etcd.client() as client:
                for _ in range(5):
                    revision = await client.put("/gone/a", b"")
                follower = Follower(client, "/gone/", revision)
                await follower.until_seen("/gone/a")
                etcd.kill_member()
                etcd.wipe_member()
                await asyncio.to_thread(etcd.start_member)
                await follower.until_relisted()
                assert follower.relisted()[0].revision < revision
                await client.put("/gone/b", b"")
                await follower.until_seen("/gone/b")
                await follower.stop()

    asyncio.run(main())


def test_a_watch_survives_a_lost_token_and_ends_where_it_is_forbidden() -> None:
    async def main() -> None:
        with Etcd(auth=True) as etcd:
            async with etcd.client() as client:
                follower = Follower(client, "/moorage/", await client.put("/moorage/a", b""))
                await follower.until_seen("/moorage/a")
                await asyncio.to_thread(etcd.restart_member)
                await client.put("/moorage/b", b"")
                await follower.until_seen("/moorage/b")
                await follower.stop()
                with pytest.raises(Forbidden):
                    async for _ in client.watch("/elsewhere", since=1):
                        raise AssertionError("nothing may be seen here")

    asyncio.run(main())
