"""Sessions and election against a real etcd: whoever loses a session knows it no later than everyone else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from moorage.barrier import clock, cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.election import Leadership, campaign, observe
from moorage.barrier.session import Session
from moorage.errors import Unavailable
from tests.support.etcd import Etcd
from tests.support.proxy import Proxy

pytestmark = pytest.mark.root
TTL = 2  # the least that etcd grants


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def port_of(etcd: Etcd) -> int:
    return int(etcd.endpoints[0].rpartition(":")[2])


def test_a_session_is_renewed_past_its_seconds_and_revoked_at_its_end(etcd: Etcd) -> None:
    async def main() -> None:
        deadlines: list[float] = []
        renewed = asyncio.Event()

        def on_renew(deadline: float) -> None:
            deadlines.append(deadline)
            if len(deadlines) > 5:
                renewed.set()

        async with etcd.client() as client:
            began = clock.now()
            async with Session.open(client, TTL, on_renew) as session:
                await client.put("/session/a", b"", lease=session.lease)
                await asyncio.wait_for(renewed.wait(), 20)
                assert not session.lost.is_set()
                assert await client.get("/session/a") is not None
                assert session.deadline > began + TTL
            assert deadlines == sorted(deadlines)
            assert session.lost.is_set()
            assert await client.get("/session/a") is None

    asyncio.run(main())


def test_a_revoked_lease_ends_the_session(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client, Session.open(client, TTL) as session:
            await client.lease_revoke(session.lease)
            await asyncio.wait_for(session.lost.wait(), 20)

    asyncio.run(main())


def test_a_session_without_etcd_ends_at_its_deadline() -> None:
    async def main() -> None:
        with Etcd() as etcd:
            async with etcd.client() as client, Session.open(client, TTL) as session:
                etcd.kill_member()
                deadline = session.deadline
                assert not session.lost.is_set()
                await session.lost.wait()
                assert clock.now() >= deadline
                # Even with etcd back, and the lease still in it, a lost session stays lost.
                await asyncio.to_thread(etcd.start_member)
                assert session.lost.is_set()
                assert session.deadline == deadline

    asyncio.run(main())


def test_a_blocked_event_loop_finds_its_session_lost_before_any_task_has_run(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client, Session.open(client, TTL) as session:
            time.sleep(TTL + 0.2)  # noqa: ASYNC251
            assert session.lost.is_set()

    asyncio.run(main())


SLEEPER = """
import asyncio, sys
from moorage.barrier.client import EtcdClient
from moorage.barrier.session import Session

async def main():
    async with EtcdClient([sys.argv[1]]) as client, Session.open(client, 2) as session:
        print("open", file=sys.stderr, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("lost" if session.lost.is_set() else "held", file=sys.stderr, flush=True)

asyncio.run(main())
"""


def test_a_process_that_was_stopped_finds_its_session_lost(etcd: Etcd) -> None:
    arguments = [sys.executable, "-c", SLEEPER, etcd.endpoints[0]]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == "open\n"
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(TTL + 1)
            process.stdin.write("\n")
            process.stdin.flush()
            os.kill(process.pid, signal.SIGCONT)
            assert process.stderr.readline() == "lost\n"
        finally:
            process.kill()


def test_a_session_outlives_an_endpoint_that_dies_in_silence(etcd: Etcd) -> None:
    async def main() -> None:
        renewals = 0

        def on_renew(deadline: float) -> None:
            nonlocal renewals
            renewals += 1

        async with (
            Proxy(port_of(etcd)) as one,
            Proxy(port_of(etcd)) as two,
            EtcdClient([one.endpoint, two.endpoint]) as client,
            Session.open(client, 3, on_renew) as session,
        ):
            for proxy in (one, two):
                proxy.lose_requests = proxy.lose_answers = True
                before = renewals
                async with asyncio.timeout(20):
                    while renewals < before + 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                proxy.cut()
            assert not session.lost.is_set()

    asyncio.run(main())


def test_candidates_lead_one_after_the_other_in_the_order_they_came(etcd: Etcd) -> None:
    prefix = "/elect/order/"

    async def main() -> None:
        async with etcd.client() as client:
            sessions = [await Session.open(client, 5).start() for _ in range(3)]
            first = await campaign(client, sessions[0], prefix, b"0")
            second = asyncio.create_task(campaign(client, sessions[1], prefix, b"1"))
            await _candidates(client, prefix, 2)
            third = asyncio.create_task(campaign(client, sessions[2], prefix, b"2"))
            await _candidates(client, prefix, 3)
            assert (await client.txn([first.compare()], [op.put("/elect/w", b"0")])).succeeded
            await sessions[0].close()
            assert first.lost.is_set()
            leader = await asyncio.wait_for(second, 60)
            assert not third.done()
            assert leader.epoch > first.epoch
            assert not (await client.txn([first.compare()], [op.put("/elect/w", b"0")])).succeeded
            assert (await client.txn([leader.compare()], [op.put("/elect/w", b"1")])).succeeded
            await leader.resign()
            assert leader.lost.is_set()
            last = await asyncio.wait_for(third, 60)
            assert last.epoch > leader.epoch
            for session in sessions[1:]:
                await session.close()

    asyncio.run(main())


async def _candidates(client: EtcdClient, prefix: str, count: int) -> None:
    async with asyncio.timeout(20):
        while len((await client.list(prefix)).items) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_candidate_that_gives_up_holds_nobody_up(etcd: Etcd) -> None:
    prefix = "/elect/cancel/"

    async def main() -> None:
        async with etcd.client() as client, Session.open(client, 5) as one, Session.open(client, 5) as two:
            first = await campaign(client, one, prefix, b"1")
            waiting = asyncio.create_task(campaign(client, two, prefix, b"2"))
            await _candidates(client, prefix, 2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert [kv.key for kv in (await client.list(prefix)).items] == [first.key]
            await first.resign()

    asyncio.run(main())


def test_a_candidate_whose_session_is_lost_is_told(etcd: Etcd) -> None:
    prefix = "/elect/lost/"

    async def main() -> None:
        async with etcd.client() as client, Session.open(client, 5) as one, Session.open(client, TTL) as two:
            first = await campaign(client, one, prefix, b"1")
            waiting = asyncio.create_task(campaign(client, two, prefix, b"2"))
            await _candidates(client, prefix, 2)
            await client.lease_revoke(two.lease)
            with pytest.raises(Unavailable):
                await asyncio.wait_for(waiting, 60)
            await first.resign()

    asyncio.run(main())


def test_a_leader_whose_key_is_deleted_is_told(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client, Session.open(client, 5) as session:
            leader = await campaign(client, session, "/elect/deleted/", b"1")
            await client.delete(leader.key)
            await asyncio.wait_for(leader.lost.wait(), 20)
            assert not session.lost.is_set()
            await leader.resign()

    asyncio.run(main())


def test_observers_see_each_leader_and_the_gaps(etcd: Etcd) -> None:
    prefix = "/elect/observe/"

    async def main() -> None:
        seen: list[tuple[int, bytes] | None] = []
        news: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()

        async def follow(client: EtcdClient) -> None:
            async with aclosing(observe(client, prefix)) as leaders:
                async for leader in leaders:
                    news.put_nowait(leader)

        async def expect() -> tuple[int, bytes] | None:
            seen.append(await asyncio.wait_for(news.get(), 20))
            return seen[-1]

        async with etcd.client() as client, Session.open(client, 5) as one, Session.open(client, 5) as two:
            follower = asyncio.create_task(follow(client))
            assert await expect() is None
            first = await campaign(client, one, prefix, b"1")
            assert await expect() == (first.epoch, b"1")
            second = asyncio.create_task(campaign(client, two, prefix, b"2"))
            await _candidates(client, prefix, 2)
            await first.resign()
            last = await second
            assert await expect() == (last.epoch, b"2")
            await last.resign()
            assert await expect() is None
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    asyncio.run(main())


def test_leadership_outlives_the_loss_of_etcds_own_leader() -> None:
    async def main() -> None:
        with Etcd(members=3) as etcd:
            async with etcd.client() as client, Session.open(client, 10) as session:
                leader: Leadership = await campaign(client, session, "/elect/three/", b"1")
                etcd.kill_member(etcd.leader())
                result = await client.txn([leader.compare(), cmp.absent("/w")], [op.put("/w", b"")])
                assert result.succeeded
                assert not leader.lost.is_set()
                await leader.resign()

    asyncio.run(main())
