"""The failpoints of the node agent, in one place. Each names the step it stands before or after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moorage import failpoints


def _around(*steps: str) -> list[str]:
    return [f"{step}.{side}" for step in steps for side in ("before", "after")]


NAMES: tuple[str, ...] = tuple(
    _around(
        "worker.register.put",
        "worker.start.layers",
        "worker.start.network",
        "worker.start.guard",
        "worker.prepare.record",
        "worker.gpu.precopy",
        "worker.gpu.quiesce",
        "worker.gpu.capture",
        "worker.gpu.back",
        "worker.gpu.fill",
        "worker.nccl.keep",
        "worker.nccl.destroy",
        "worker.nccl.ids",
        "worker.nccl.rebuild",
        "worker.nccl.part",
        "worker.prepare.hooks",
        "worker.freeze.cgroup",
        "worker.freeze.drain",
        "worker.seal.network",
        "worker.capture.backlog",
        "worker.capture.dump",
        "worker.capture.layer",
        "worker.capture.record",
        "worker.vote.captured",
        "worker.vote.persisted",
        "worker.outcome.hooks",
        "worker.outcome.backlog",
        "worker.outcome.unseal",
        "worker.outcome.thaw",
        "worker.persist.images",
        "worker.persist.layer",
        "worker.persist.manifest",
        "worker.restore.verify",
        "worker.restore.network",
        "worker.restore.fetch",
        "worker.restore.layers",
        "worker.restore.rebuild",
        "worker.restore.backlog",
        "worker.release.hooks",
        "worker.release.unseal",
        "worker.release.thaw",
        "worker.kill.processes",
        "worker.kill.network",
        "worker.kill.layers",
        "worker.finish.logs",
        "worker.finish.results",
        "worker.finish.remove",
    )
)

failpoints.declare(*NAMES)


@asynccontextmanager
async def step(name: str) -> AsyncIterator[None]:
    """Pass ``<name>.before``, do the step, pass ``<name>.after`` if it did not raise."""
    await failpoints.hit(f"{name}.before")
    yield
    await failpoints.hit(f"{name}.after")
