"""The processes of one job that use NCCL, as the coordinator reaches them: through the workers, one call for each pod.

Nothing of what goes through here is kept anywhere: a coordinator that follows begins with `Fleet.look`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from moorage import rpc
from moorage.barrier import clock
from moorage.coordinator.on_pods import all_pods, fence_of, on_pod
from moorage.errors import Unavailable
from moorage.nccl_quiesce import control, rebuild
from moorage.nccl_quiesce.control import Process
from moorage.nccl_quiesce.model import Order, Snapshot
from moorage.v1 import worker_pb2

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

T = TypeVar("T")

#: How long one round may take on one pod, in seconds; then it is asked again.
ROUND_SECONDS = 5.0


class Fleet:
    """``processes``: by their own number, as they were when last looked at. ``rank_of``: their numbers in the cut."""

    def __init__(self, leader: Leader, job: Job, incarnation: int) -> None:
        self._leader, self._job, self._incarnation = leader, job, incarnation
        self.processes: dict[int, Process] = {}
        self.pod_of: dict[int, int] = {}
        self.rank_of: dict[int, int] = {}
        self.parted: set[int] = set()  #: pods that have let go of their processes: all was done there
        self._process_of: dict[int, int] = {}
        self._waiting: dict[int, list[tuple[int, Order, asyncio.Future[Snapshot | None]]]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    # -- looking

    async def look(self, seconds: float, *, step: str = "look") -> None:
        """Read anew who is there. ``step``: ``back`` waits up to ``seconds`` for pods to run again after a capture.

        Raises `Failure`, `NodeGone`, `LeadershipLost`.
        """
        replies = await all_pods(self._ask(pod, step, {}, seconds) for pod in range(self._job.state.pods))
        self.processes, self.pod_of, self.parted = {}, {}, set()
        for pod, reply in enumerate(replies):
            if reply.parted:
                self.parted.add(pod)
            for number, body in reply.answers.items():
                self.processes[number] = control.decode(body, Process)
                self.pod_of[number] = pod
        spec = self._job.spec
        world = max(1, spec.pods) * max(1, spec.ranks_per_pod)
        self.rank_of = rebuild.numbered(self.processes, world)
        self._process_of = {rank: number for number, rank in self.rank_of.items()}

    @property
    def ranks(self) -> list[int]:
        """All numbers in the cut."""
        return sorted(self._process_of)

    @property
    def newest(self) -> int:
        """The newest cut that any process has heard of."""
        return max((process.report.attempt for process in self.processes.values()), default=0)

    def name(self, rank: int) -> str:
        """Where people find a number in the cut, which is a rank or, behind all ranks, a process that is none."""
        number = self._process_of[rank]
        pod = self.pod_of[number]
        return f"{rank} is {self.processes[number]} of pod {pod} on {self._job.state.seats[pod].node}"

    # -- telling

    async def exchange(self, rank: int, order: Order) -> Snapshot | None:
        """`moorage.nccl_quiesce.driver.Transport`: what is for the same pod at the same moment goes in one call."""
        number = self._process_of[rank]
        pod = self.pod_of[number]
        answer: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()
        if pod not in self._waiting:
            self._waiting[pod] = []
            call = asyncio.create_task(self._round(pod))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        self._waiting[pod].append((number, order, answer))
        report = await answer
        return None if report is None else msgspec.structs.replace(report, rank=rank)

    async def _round(self, pod: int) -> None:
        await asyncio.sleep(0)  # the other exchanges of this round are begun in the same turn of the loop
        waiting = self._waiting.pop(pod)
        orders = {number: control.encode(order) for number, order, _ in waiting}
        try:
            node = self._leader.workers.live(self._job.state.seats[pod].node)
            request = self._request(pod, "round", orders, ROUND_SECONDS)
            call = self._leader.workers.stub(node).QuiescePod
            what = f"node {node.node}"
            reply = await rpc.unary(call, request, what=what, timeout=2 * ROUND_SECONDS, trace_id=self._job.state.trace)
            answers = {number: control.decode(body, Snapshot) for number, body in reply.answers.items()}
        except Exception as error:  # whatever it is, the order goes out again, and the deadline ends it
            silent = Unavailable(f"pod {pod}: {error}")
            for _, _, answer in waiting:
                if not answer.done():
                    answer.set_exception(silent)
            return
        for number, _, answer in waiting:
            if not answer.done():
                answer.set_result(answers.get(number))
        # Who has no answer calls the order out of date; the worker names an error for one that does not answer.

    async def each(self, step: str, orders: Mapping[int, Any], kind: type[T], seconds: float) -> dict[int, T]:
        """Have the processes do one step, all at once. Raises `Failure`, `NodeGone`, `LeadershipLost`."""
        by_pod: dict[int, dict[int, bytes]] = {}
        for number, order in orders.items():
            by_pod.setdefault(self.pod_of[number], {})[number] = control.encode(order)

        async def one(pod: int, bodies: dict[int, bytes]) -> dict[int, T]:
            reply = await self._ask(pod, step, bodies, seconds)
            return {number: control.decode(body, kind) for number, body in reply.answers.items()}

        answers = await all_pods(one(pod, bodies) for pod, bodies in by_pod.items())
        return {number: answer for some in answers for number, answer in some.items()}

    async def tell(self, step: str, order: Any, seconds: float) -> None:
        """Something that all pods must know, also those without a process. Raises `Failure`, `NodeGone`."""
        body = {0: control.encode(order)}
        await all_pods(self._ask(pod, step, body, seconds) for pod in range(self._job.state.pods))

    async def close(self) -> None:
        """End what is under way."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(self, pod: int, step: str, orders: dict[int, bytes], seconds: float) -> Any:
        request = self._request(pod, step, orders, seconds)
        until = clock.now() + seconds + 1.0
        return await on_pod(self._leader, self._job, pod, "quiesce", request, until=until, extra=seconds)

    def _request(self, pod: int, step: str, orders: dict[int, bytes], seconds: float) -> worker_pb2.QuiesceRequest:
        fence = fence_of(self._leader, self._job, pod, self._incarnation)
        return worker_pb2.QuiesceRequest(fence=fence, step=step, seconds=seconds, orders=orders)
