"""The two-phase barrier on a real etcd: rounds, deadlines, seeded faults, and a death at every write."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from moorage import failpoints
from moorage.barrier import clock, cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.kv import Compare, Deleted, GetOp, Op, TxnResult
from moorage.barrier.twophase import Attempts, decide
from moorage.errors import Conflict, Fenced, NotFound, Unavailable
from moorage.records import AttemptStart, IncarnationRecord, Keys, Outcome, StopReason, Vote
from tests.support.barrier_scenario import JOB, scenario
from tests.support.etcd import Etcd

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def begin(attempt: int = 1, *, pods: int = 2, kind: StopReason = "resume", seconds: float = 60) -> AttemptStart:
    return AttemptStart(attempt=attempt, incarnation=1, pods=pods, kind=kind, deadline_seconds=seconds)


def vote(pod: int, attempt: int = 1, *, ok: bool = True) -> Vote:
    return Vote(pod=pod, incarnation=1, attempt=attempt, ok=ok)


async def prepare(client: EtcdClient, cluster: str, leader: str = "one") -> tuple[Keys, Compare]:
    """A job at incarnation 1 and a leader's key; returns the leader's fence."""
    keys = Keys(cluster)
    record = msgspec.json.encode(IncarnationRecord(incarnation=1, placement=["a", "b"]))
    key = keys.leader + leader
    await client.delete_prefix(keys.leader)
    result = await client.txn([cmp.absent(key)], [op.put(key, b""), op.put(keys.incarnation(JOB), record)])
    return keys, cmp.create_revision(key, result.revision)


def test_a_round_ends_in_resume_and_all_learn_of_it(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            keys, fence = await prepare(client, "round")
            attempts = Attempts(client, keys, JOB)
            await attempts.start(begin(), fence=[fence])
            workers = [Attempts(client, keys, JOB, by=f"node-{n}") for n in range(2)]
            waiting = [asyncio.create_task(w.await_outcome(1, deadline=clock.now() + 60)) for w in workers]
            seen: list[int] = []

            async def collect() -> Outcome:
                async with aclosing(attempts.watch_votes(1, "captured")) as rounds:
                    async for votes in rounds:
                        seen.append(len(votes))
                        decision = decide(begin(), votes, outcome=None, past_deadline=False, lost=set())
                        if decision.action == "conclude":
                            break
                outcome = Outcome(kind="resume", incarnation=1, attempt=1, by="coordinator")
                return await attempts.conclude(outcome, fence=[fence], also=[op.put(keys.latest(JOB), b"1")])

            collecting = asyncio.create_task(collect())
            for pod, worker in enumerate(workers):
                assert await worker.vote("captured", vote(pod))
            outcome = await collecting
            assert seen[-1] == 2
            assert seen == sorted(seen)
            assert await asyncio.gather(*waiting) == [outcome, outcome]
            assert not await workers[0].vote("captured", vote(0, ok=False))
            assert await workers[0].vote("persisted", vote(0)), "persisting goes on beside the running job"
            assert await attempts.votes(1, "persisted") == {0: vote(0)}
            await attempts.forget(1)
            assert not await workers[1].vote("persisted", vote(1)), "a vote for a forgotten attempt"
            assert (await client.list(keys.attempt(JOB, 1))).items == ()

    asyncio.run(main())


def test_a_stop_is_concluded_with_the_commit_and_only_once(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            keys, fence = await prepare(client, "stop")
            attempts = Attempts(client, keys, JOB)
            await attempts.start(begin(kind="stop"), fence=[fence], also=[op.put(keys.state(JOB), b"capturing")])
            with pytest.raises(Conflict):
                await attempts.start(begin(kind="resume"), fence=[fence])
            with pytest.raises(Conflict):
                await attempts.forget(1)
            for step in ("captured", "persisted"):
                for pod in range(2):
                    assert await attempts.vote(step, vote(pod))
            stop = Outcome(kind="stop", incarnation=1, attempt=1, by="one")
            commit = [op.put(keys.checkpoint(JOB, "c1"), b"{}"), op.put(keys.latest(JOB), b"c1")]
            assert await attempts.conclude(stop, fence=[fence], also=commit) == stop
            assert await attempts.conclude(stop, fence=[fence], also=commit) == stop
            assert await attempts.abort(1, 1, "late", "node") == stop
            latest = await client.get(keys.latest(JOB))
            assert latest is not None
            assert latest.version == 1

    asyncio.run(main())


def test_who_no_longer_leads_or_runs_an_old_incarnation_is_fenced(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            keys, fence = await prepare(client, "fenced")
            attempts = Attempts(client, keys, JOB)
            await attempts.start(begin(), fence=[fence])
            resume = Outcome(kind="resume", incarnation=1, attempt=1)
            with pytest.raises(NotFound):
                await attempts.conclude(Outcome(kind="resume", incarnation=1, attempt=9), fence=[fence])
            with pytest.raises(NotFound):
                await attempts.abort(9, 1, "", "")
            with pytest.raises(Fenced, match="incarnation"):
                await attempts.abort(1, 2, "", "")
            _, newer = await prepare(client, "fenced", "two")
            with pytest.raises(Fenced, match="no longer the leader"):
                await attempts.conclude(resume, fence=[fence])
            with pytest.raises(Fenced, match="no longer the leader"):
                await attempts.start(begin(2), fence=[fence])
            raised = msgspec.json.encode(IncarnationRecord(incarnation=2, placement=["a", "b"]))
            await client.put(keys.incarnation(JOB), raised)
            with pytest.raises(Fenced, match="incarnation 2"):
                await attempts.conclude(resume, fence=[newer])
            with pytest.raises(Fenced, match="incarnation 2"):
                await attempts.start(begin(3), fence=[newer])
            assert not await attempts.vote("captured", Vote(pod=0, incarnation=2, attempt=1))
            assert not await attempts.vote("captured", vote(2))
            assert (await attempts.abort(1, 1, "overtaken", "node")).kind == "abort"
            assert not await attempts.vote("persisted", vote(0)), "nothing is persisted after an abort"

    asyncio.run(main())


def test_a_worker_aborts_at_its_deadline_when_nobody_concludes(etcd: Etcd) -> None:
    async def main() -> None:
        async with etcd.client() as client:
            keys, fence = await prepare(client, "deadline")
            attempts = Attempts(client, keys, JOB, by="node-1")
            with pytest.raises(NotFound):
                await attempts.await_outcome(1, deadline=clock.now())
            await attempts.start(begin(seconds=0.2), fence=[fence])
            workers = [Attempts(client, keys, JOB, by=f"node-{n}") for n in range(3)]
            deadline = clock.now() + 0.2
            found = await asyncio.gather(*(worker.await_outcome(1, deadline=deadline) for worker in workers))
            assert clock.now() >= deadline
            assert len(set(map(repr, found))) == 1
            assert found[0].kind == "abort"
            assert found[0].reason == "no outcome within 0.2 s"
            late = Outcome(kind="resume", incarnation=1, attempt=1)
            assert await attempts.conclude(late, fence=[fence]) == found[0]

    asyncio.run(main())


def test_a_worker_acts_on_nothing_while_etcd_is_away_past_its_deadline() -> None:
    async def main() -> None:
        with Etcd() as etcd:
            async with etcd.client(timeout=1) as client:
                keys, fence = await prepare(client, "away")
                attempts = Attempts(client, keys, JOB, by="node")
                await attempts.start(begin(seconds=0.5), fence=[fence])
                waiting = asyncio.create_task(attempts.await_outcome(1, deadline=clock.now() + 0.5))
                etcd.kill_member()
                _, unfinished = await asyncio.wait({waiting}, timeout=2)
                assert unfinished, "an outcome that nobody has read"
                await asyncio.to_thread(etcd.start_member)
                outcome = await asyncio.wait_for(waiting, 60)
                assert outcome == await attempts.outcome(1)
                assert outcome.kind == "abort"

    asyncio.run(main())


def test_an_outcome_reaches_a_worker_through_a_compaction_and_a_restart() -> None:
    async def main() -> None:
        with Etcd() as etcd:
            async with etcd.client() as client, etcd.client() as other:
                keys, fence = await prepare(client, "through")
                attempts = Attempts(client, keys, JOB)
                await attempts.start(begin(), fence=[fence])
                waiting = asyncio.create_task(Attempts(other, keys, JOB).await_outcome(1, deadline=clock.now() + 300))
                await asyncio.to_thread(etcd.restart_member)
                outcome = await attempts.conclude(Outcome(kind="resume", incarnation=1, attempt=1), fence=[fence])
                etcd.compact(await client.put("/noise", b""))
                assert await asyncio.wait_for(waiting, 60) == outcome

    asyncio.run(main())


class Died(BaseException):
    """This process was killed."""


class FaultyClient(EtcdClient):
    """Writes of which some are not made, some are made with nobody told, and in some the process dies."""

    rng = random.Random(0)
    faults = 0.25

    async def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        if all(isinstance(each, GetOp) for each in success) or self.rng.random() > self.faults:
            await asyncio.sleep(self.rng.random() * 0.004)
            return await super().txn(compare, success, failure)
        fault = self.rng.choice(["unsent", "unknown", "die before", "die after"])
        if fault in ("unknown", "die after"):
            await super().txn(compare, success, failure)
        if fault.startswith("die"):
            raise Died
        raise Unavailable("a fault", fault)


async def stubborn_worker(client: EtcdClient, keys: Keys, pod: int, *, ok: bool, patience: float) -> Outcome:
    """Votes, waits for the outcome, aborts at its deadline; started again when it dies, asked again on an error."""
    deadline = clock.now() + patience
    while True:
        attempts = Attempts(client, keys, JOB, by=f"node-{pod}")
        try:
            await attempts.vote("captured", vote(pod, ok=ok))
            return await attempts.await_outcome(1, deadline=deadline)
        except (Died, Unavailable):
            await asyncio.sleep(0)


async def collect(attempts: Attempts, keys: Keys, name: str, fence: Compare, start: AttemptStart) -> Outcome:
    async with aclosing(attempts.watch_votes(1, "captured")) as rounds:
        async for votes in rounds:
            decision = decide(start, votes, outcome=None, past_deadline=False, lost=set())
            if decision.kind is not None:
                mine = Outcome(kind=decision.kind, incarnation=1, attempt=1, by=name)
                also = [op.put(keys.latest(JOB), name.encode())] if decision.kind == "resume" else []
                return await attempts.conclude(mine, fence=[fence], also=also)
    raise AssertionError("a watch does not end")


async def coordinator(client: EtcdClient, keys: Keys, name: str, fence: Compare, pods: int) -> Outcome | None:
    """Until the attempt has an outcome, or this coordinator is fenced."""
    start = begin(pods=pods)
    while True:
        attempts = Attempts(client, keys, JOB)
        tasks: list[asyncio.Task[Outcome]] = []
        try:
            await attempts.start(start, fence=[fence])
            tasks = [
                asyncio.create_task(collect(attempts, keys, name, fence, start)),
                asyncio.create_task(attempts.await_outcome(1, deadline=clock.now() + 60)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        except Fenced:
            return None
        except (Died, Unavailable):
            await asyncio.sleep(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def replay(client: EtcdClient, keys: Keys, since: int, pods: int) -> Outcome | None:
    """Go through etcd's whole history and judge each outcome by what stood at that revision."""
    state: dict[str, bytes] = {}
    outcome: Outcome | None = None
    end = await client.put(keys.root + "end", b"")
    async with aclosing(client.watch(keys.root, since=since)) as batches:
        async for batch in batches:
            by_revision: dict[int, list[str]] = {}
            for event in batch.events:
                if isinstance(event, Deleted):
                    state.pop(event.key, None)
                    continue
                state[event.kv.key] = event.kv.value
                by_revision.setdefault(event.kv.mod_revision, []).append(event.kv.key)
                if event.kv.key != keys.outcome(JOB, 1):
                    continue
                assert outcome is None, "a second outcome"
                outcome = msgspec.json.decode(event.kv.value, type=Outcome)
                if outcome.kind == "abort":
                    continue
                votes = [state.get(keys.vote(JOB, 1, "captured", pod)) for pod in range(pods)]
                assert all(v is not None and msgspec.json.decode(v, type=Vote).ok for v in votes)
                assert keys.leader + outcome.by in state, "concluded by one who no longer led"
            for written in by_revision.values():
                assert keys.latest(JOB) not in written or keys.outcome(JOB, 1) in written, "committed without outcome"
            if batch.revision >= end:
                return outcome
    raise AssertionError


@pytest.mark.parametrize("block", range(4))
def test_seeded_faults_and_deaths_never_split_the_outcome(etcd: Etcd, block: int) -> None:
    async def run(client: FaultyClient, seed: int) -> None:
        rng = random.Random(seed)
        client.rng, client.faults = random.Random(seed), rng.choice([0.1, 0.3, 0.6])
        pods, refusing, patience = rng.randint(1, 4), rng.random() < 0.15, rng.choice([0.01, 0.05, 30])
        async with etcd.client() as direct:
            since = (await direct.list("/moorage/")).revision + 1
            keys, fence = await prepare(direct, f"faults-{seed}", "one")
            first = asyncio.create_task(coordinator(client, keys, "one", fence, pods))
            while not first.done() and await direct.get(keys.start(JOB, 1)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            workers = [
                asyncio.create_task(
                    stubborn_worker(client, keys, pod, ok=not (refusing and pod == 0), patience=patience)
                )
                for pod in range(pods)
            ]
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.02)
                _, newer = await prepare(direct, f"faults-{seed}", "two")
                second = await coordinator(client, keys, "two", newer, pods)
            else:
                second = None
            found = await asyncio.gather(*workers)
            concluded = await first
            outcome = await replay(direct, keys, since, pods)
            assert outcome is not None
            assert all(each == outcome for each in found)
            assert concluded in (None, outcome)
            assert second in (None, outcome)
            if refusing or patience == 30:
                assert outcome.kind == ("abort" if refusing else "resume")

    async def main() -> None:
        async with FaultyClient(etcd.endpoints) as client:
            for seed in range(block * 12, block * 12 + 12):
                try:
                    await run(client, seed)
                except BaseException as error:
                    error.add_note(f"seed {seed}")
                    raise

    asyncio.run(main())


def die_at(etcd: Etcd, folder: Path, name: str) -> None:
    """Run the scenario with a SIGKILL at ``name``, then again to its end, and look at what is left."""
    cluster = "die-" + name.replace(".", "-")[-26:].strip("-")
    armed = folder / name
    armed.mkdir()
    (armed / name).write_text("kill")
    renew = ["--renew"] if "renew" in name else []
    command = [sys.executable, "-m", "tests.support.barrier_scenario", etcd.endpoints[0], cluster, *renew]
    environment = {**os.environ, "MOORAGE_FAILPOINTS_DIR": str(armed)}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, f"{name} was not reached: {done.stderr}"

    async def finish() -> None:
        keys = Keys(cluster)
        async with etcd.client() as client:
            since = (await client.list(keys.leader)).items
            await client.delete_prefix(keys.leader)  # what the end of the dead process's lease would do
            await scenario(etcd.endpoints[0], cluster)
            left = {kv.key.removeprefix(keys.root): kv.value for kv in (await client.list(keys.root)).items}
            assert set(left) == {f"jobs/{JOB}/{name}" for name in ("incarnation", "latest", "state")} | {
                f"attempts/{JOB}/00000002/{name}" for name in ("start", "outcome")
            }
            outcome = msgspec.json.decode(left[f"attempts/{JOB}/00000002/outcome"], type=Outcome)
            assert outcome.kind == "abort"
            assert len(since) <= 1

    asyncio.run(finish())


def test_a_process_killed_at_any_write_is_followed_by_one_that_comes_to_the_same_end(
    etcd: Etcd, tmp_path: Path
) -> None:
    names = sorted(name for name in failpoints.declared() if name.startswith("barrier."))
    assert len(names) >= 20
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: die_at(etcd, tmp_path, name), names))
