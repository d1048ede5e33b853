"""What a coordinator tells Prometheus. No label is a job, a node or anything else that grows."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from moorage.coordinator.machine.instructions import Say
from moorage.coordinator.machine.state import PHASES
from moorage.observe.registry import by_label, gauge, make

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

_PAUSES = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_RESTORES = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 300, 600)
_FAILURES = {"rank.failed": "rank", "job.hung": "hang", "pod.lost": "pod", "node.lost": "node"}


class Metrics:
    """Counts what happens to jobs, and reads the rest off the leader. ``leader()`` is None while another one leads."""

    def __init__(self, leader: Callable[[], Leader | None]) -> None:
        self._leader = leader
        self.registry = make("coordinator", self._now)
        registry = self.registry
        self._checkpoints = Counter(
            "moorage_checkpoints", "Checkpoint attempts that ended, by outcome.", ["outcome"], registry=registry
        )
        for outcome in ("committed", "aborted"):
            self._checkpoints.labels(outcome)
        self._pause = Histogram(
            "moorage_checkpoint_pause_seconds",
            "How long a job stood still for a committed checkpoint.",
            buckets=_PAUSES,
            registry=registry,
        )
        self._bytes = Counter(
            "moorage_checkpoint_bytes",
            "Bytes of committed checkpoints, before deduplication.",
            registry=registry,
        )
        self._new = Counter(
            "moorage_checkpoint_new_bytes", "Bytes that committed checkpoints added to the store.", registry=registry
        )
        self._restore = Histogram(
            "moorage_restore_seconds",
            "From the order or the failure until a restored job ran.",
            buckets=_RESTORES,
            registry=registry,
        )
        self._failures = Counter("moorage_failures", "What failed in running jobs.", ["kind"], registry=registry)
        for kind in _FAILURES.values():
            self._failures.labels(kind)
        self._ended = Counter("moorage_jobs_ended", "Jobs that came to an end.", ["phase"], registry=registry)
        for phase in ("finished", "failed", "stopped"):
            self._ended.labels(phase)

    def told(self, say: Say) -> None:
        """Count one sentence of a job's story."""
        if say.kind == "checkpoint.committed":
            self._checkpoints.labels("committed").inc()
            self._bytes.inc(float(say.data.get("bytes_total", 0)))
            self._new.inc(float(say.data.get("bytes_new", 0)))
            if pause := float(say.data.get("pause_seconds", 0)):
                self._pause.observe(pause)
        elif say.kind == "checkpoint.aborted":
            self._checkpoints.labels("aborted").inc()
        elif say.kind == "restore.done":
            self._restore.observe(float(say.data.get("seconds", 0)))
        elif say.kind in _FAILURES:
            self._failures.labels(_FAILURES[say.kind]).inc()
        elif say.finish in ("finished", "failed", "stopped"):
            self._ended.labels(say.finish).inc()

    def _now(self) -> Iterable[Metric]:
        leader = self._leader()
        yield gauge("moorage_coordinator_leading", "1 on the coordinator that leads.", float(leader is not None))
        if leader is None:
            return
        jobs = Tally(job.state.phase for job in list(leader.jobs.values()))
        yield by_label("moorage_jobs", "Jobs by phase.", "phase", {phase: float(jobs[phase]) for phase in PHASES})
        live = list(leader.nodes.live.values())
        states = {
            "ready": float(sum(record.ready for record in live)),
            "not_ready": float(sum(not record.ready for record in live)),
            "lost": float(len(leader.nodes.known) - len(live)),
        }
        yield by_label("moorage_nodes", "Nodes by state.", "state", states)
        cordoned = sum(record.node in leader.cordons for record in list(leader.nodes.known.values()))
        yield gauge("moorage_nodes_cordoned", "Nodes on which nothing is placed.", float(cordoned))
        yield gauge("moorage_gpus", "GPUs of live nodes.", float(sum(len(record.gpus) for record in live)))
        used = list(leader.used().values())
        yield gauge("moorage_pods", "Pods that have a node.", float(sum(need.pods for need in used)))
        yield gauge("moorage_gpus_used", "GPUs that pods have.", float(sum(need.gpus for need in used)))
        yield gauge("moorage_drains_running", "Drains that are not over.", float(len(leader.drains.running())))
