"""The blocking client: the asynchronous one on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from moorage.config import ClientConfig
from moorage.coordinator.client.aio import ALL_RANKS, AsyncClient, AsyncJob
from moorage.coordinator.client.drains import DrainInfo
from moorage.coordinator.client.models import (
    AttemptInfo,
    CheckInfo,
    CheckpointInfo,
    CompatInfo,
    EventInfo,
    FindingInfo,
    Inspection,
    JobFindingInfo,
    JobInfo,
    LogLine,
    NodeInfo,
    PruneInfo,
    StatusInfo,
)
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2

T = TypeVar("T")


class _Loop:
    """An event loop in a daemon thread. A call can be interrupted with Ctrl-C: its coroutine is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moorage-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        under_way: asyncio.Task[Any] | None = None

        async def advance() -> tuple[bool, T | None]:
            nonlocal under_way
            under_way = asyncio.current_task()
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        async def finish() -> None:
            # An interrupt may have come at any point of `run`: the step that it left behind must end first.
            if under_way is not None and not under_way.done():
                under_way.cancel()
                await asyncio.wait([under_way])
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

        try:
            while True:
                more, item = self.run(advance())
                if not more:
                    return
                yield item  # type: ignore[misc]
        finally:
            self.run(finish())

    def close(self) -> None:
        if self._loop.is_closed():
            return

        async def cancel_all() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        try:
            self.run(cancel_all())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Client:
    """A client of one cluster; see `AsyncClient` for what each verb does and raises."""

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        config: ClientConfig | None = None,
        patience: float = 30.0,
        on_silence: Callable[[str], None] | None = None,
    ) -> None:
        self._loop = _Loop()
        try:
            self._client = self._loop.run(_make(coordinator, config, patience, on_silence))
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._loop.run(self._client.close())
        self._loop.close()

    @property
    def config(self) -> ClientConfig:
        """The settings in use."""
        return self._client.config

    def submit(self, spec: types_pb2.JobSpec, *, if_exists: str = "fail", on: Iterable[str] = ()) -> Job:
        """Submit a job as `job_spec` or `torchrun_spec` made it; ``on``: the nodes that it starts on."""
        return Job(self._loop, self._loop.run(self._client.submit(spec, if_exists=if_exists, on=on)))

    def run(self, command: Sequence[str], *, if_exists: str = "fail", **options: Any) -> Job:
        """Run ``command`` once in each pod; ``options`` are those of `job_spec`."""
        return Job(self._loop, self._loop.run(self._client.run(command, if_exists=if_exists, **options)))

    def torchrun(self, script: str, arguments: Sequence[str] = (), *, if_exists: str = "fail", **options: Any) -> Job:
        """Run ``script`` as torchrun would; ``options`` are those of `torchrun_spec`."""
        started = self._client.torchrun(script, arguments, if_exists=if_exists, **options)
        return Job(self._loop, self._loop.run(started))

    def job(self, job: str) -> Job:
        """The job with this id or name. Raises `NotFound`."""
        return Job(self._loop, self._loop.run(self._client.job(job)))

    def jobs(self, *, all: bool = False) -> list[JobInfo]:
        """The jobs, with ``all`` also those that are over."""
        return self._loop.run(self._client.jobs(all=all))

    def nodes(self) -> list[NodeInfo]:
        """The nodes that the cluster knows."""
        return self._loop.run(self._client.nodes())

    def describe_node(self, node: str) -> list[FindingInfo]:
        """What a node can and cannot do."""
        return self._loop.run(self._client.describe_node(node))

    def checkpoints(self, job: str = "") -> list[CheckpointInfo]:
        """The committed checkpoints of a job, or of all jobs, oldest first."""
        return self._loop.run(self._client.checkpoints(job))

    def inspect(self, checkpoint: str | CheckpointInfo) -> Inspection:
        """What is inside a checkpoint."""
        return self._loop.run(self._client.inspect(checkpoint))

    def check(
        self,
        checkpoint: str | CheckpointInfo,
        *,
        read_data: bool = False,
        progress: Callable[[CheckInfo], None] | None = None,
    ) -> CheckInfo:
        """Verify that all that a checkpoint needs is in the store."""
        return self._loop.run(self._client.check(checkpoint, read_data=read_data, progress=progress))

    def compat(self, checkpoint: str | CheckpointInfo, node: str) -> CompatInfo:
        """Whether a checkpoint can be restored on a node, rule by rule."""
        return self._loop.run(self._client.compat(checkpoint, node))

    def pin(self, checkpoint: str | CheckpointInfo, *, unpin: bool = False) -> CheckpointInfo:
        """Keep a checkpoint whatever ``--keep-last`` says, or no longer."""
        return self._loop.run(self._client.pin(checkpoint, unpin=unpin))

    def prune(self, *, dry_run: bool = False) -> PruneInfo:
        """Remove from the store what no checkpoint needs."""
        return self._loop.run(self._client.prune(dry_run=dry_run))

    def cordon(
        self, nodes: Iterable[str] = (), *, selector: str = "", reason: str = "", dry_run: bool = False
    ) -> list[NodeInfo]:
        """Place nothing new on these nodes."""
        return self._loop.run(self._client.cordon(nodes, selector=selector, reason=reason, dry_run=dry_run))

    def uncordon(self, nodes: Iterable[str] = (), *, selector: str = "", dry_run: bool = False) -> list[NodeInfo]:
        """Take nodes into service again."""
        return self._loop.run(self._client.uncordon(nodes, selector=selector, dry_run=dry_run))

    def drain(self, nodes: Iterable[str] = (), **options: Any) -> DrainInfo:
        """Begin to move every job off these nodes; ``options`` are those of `AsyncClient.drain`."""
        return self._loop.run(self._client.drain(nodes, **options))

    def follow_drain(self, drain: str, *, progress: Callable[[DrainInfo], None] | None = None) -> DrainInfo:
        """Wait until a drain is over."""
        return self._loop.run(self._client.follow_drain(drain, progress=progress))

    def cancel_drain(self, drain: str) -> DrainInfo:
        """Let no move of a drain begin any more."""
        return self._loop.run(self._client.cancel_drain(drain))

    def audit(self, job: str = "", *, follow: bool = False) -> Iterator[EventInfo]:
        """Who asked for what, allowed or refused."""
        return self._loop.iterate(self._client.audit(job, follow=follow))

    def node_token(self, *, node: str = "", seconds: float = 0.0) -> pb.NodeTokenReply:
        """A token with which one machine may join."""
        return self._loop.run(self._client.node_token(node=node, seconds=seconds))

    def remove_node(self, node: str) -> list[str]:
        """Revoke what a node was given; returns the serial numbers."""
        return self._loop.run(self._client.remove_node(node))

    def status(self) -> StatusInfo:
        """Who leads, and where the store is."""
        return self._loop.run(self._client.status())


async def _make(
    coordinator: str | None, config: ClientConfig | None, patience: float, on_silence: Callable[[str], None] | None
) -> AsyncClient:
    # In the loop's thread: gRPC binds its channels to the loop that is running when they are made.
    return AsyncClient(coordinator, config=config, patience=patience, on_silence=on_silence)


class Job:
    """A job, by its id; see `AsyncJob` for what each verb does and raises."""

    def __init__(self, loop: _Loop, job: AsyncJob) -> None:
        self._loop = loop
        self._job = job
        self.id = job.id

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def status(self) -> JobInfo:
        """The job as it stands."""
        return self._loop.run(self._job.status())

    def watch(self) -> Iterator[JobInfo]:
        """The job now, then at each change, until it is over."""
        return self._loop.iterate(self._job.watch())

    def until(self, reached: Callable[[JobInfo], bool], *, timeout: float | None = None) -> JobInfo:
        """Wait until ``reached(job)``. Raises `TimeoutError`, or `Conflict` if the job ends before."""
        return self._loop.run(self._job.until(reached, timeout=timeout))

    def wait(self, *, timeout: float | None = None) -> JobInfo:
        """Wait until the job is over. Raises `TimeoutError`."""
        return self._loop.run(self._job.wait(timeout=timeout))

    def attempt(self, attempt: int, *, progress: Callable[[AttemptInfo], None] | None = None) -> AttemptInfo:
        """Follow an attempt to its end."""
        return self._loop.run(self._job.attempt(attempt, progress=progress))

    def checkpoint(self, *, progress: Callable[[AttemptInfo], None] | None = None) -> CheckpointInfo:
        """Checkpoint the job; it runs on. Returns when the checkpoint is committed."""
        return self._loop.run(self._job.checkpoint(progress=progress))

    def park(self, *, keep: str = "", progress: Callable[[AttemptInfo], None] | None = None) -> CheckpointInfo:
        """Checkpoint the job and take it off its nodes."""
        return self._loop.run(self._job.park(keep=keep, progress=progress))

    def move(self, to: Iterable[str] = (), *, progress: Callable[[AttemptInfo], None] | None = None) -> JobInfo:
        """Checkpoint the job and restore it on these nodes."""
        return self._loop.run(self._job.move(to, progress=progress))

    def restore(
        self,
        checkpoint: str | CheckpointInfo | None = None,
        *,
        on: Iterable[str] = (),
        if_incompatible: str | None = None,
    ) -> JobInfo:
        """Bring the job back from a checkpoint (the newest), on these nodes."""
        return self._loop.run(self._job.restore(checkpoint, on=on, if_incompatible=if_incompatible))

    def examine(self) -> list[JobFindingInfo]:
        """What of the job cannot be saved now, with nothing touched."""
        return self._loop.run(self._job.examine())

    def stop(self, *, checkpoint: bool = False, grace: float = 10.0) -> JobInfo:
        """Stop the job, with ``checkpoint`` after a last one."""
        return self._loop.run(self._job.stop(checkpoint=checkpoint, grace=grace))

    def delete(self, *, dry_run: bool = False) -> list[str]:
        """Forget the job, which must be over, with its logs and its checkpoints; returns their ids."""
        return self._loop.run(self._job.delete(dry_run=dry_run))

    def events(self, *, follow: bool = False) -> Iterator[EventInfo]:
        """The job's events, oldest first; with ``follow`` until the job is over."""
        return self._loop.iterate(self._job.events(follow=follow))

    def logs(self, *, rank: int = ALL_RANKS, follow: bool = False) -> Iterator[LogLine]:
        """What the ranks wrote; with ``follow`` until the job is over."""
        return self._loop.iterate(self._job.logs(rank=rank, follow=follow))

    def exec(
        self,
        command: Sequence[str],
        *,
        rank: int = 0,
        stdin: AsyncIterator[bytes] | None = None,
        output: Callable[[bytes, bool], None] | None = None,
    ) -> int:
        """Run a command in the pod of a rank; returns its exit code."""
        return self._loop.run(self._job.exec(command, rank=rank, stdin=stdin, output=output))

    def pull(
        self, path: str = "", *, to: Path | str = ".", progress: Callable[[int, int], None] | None = None
    ) -> list[str]:
        """Copy a path of the job into ``to``; returns the files. ``progress`` gets the numbers of files and bytes."""
        return self._loop.run(self._job.pull(path, to=to, progress=progress))
