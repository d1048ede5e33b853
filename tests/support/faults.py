"""The kill matrix: every declared failpoint, the process that dies there, and the scenario that reaches it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moorage import failpoints
from moorage.coordinator.machine.table import TABLE, failpoint
from tests.support import scenario_brief as brief
from tests.support import scenario_live as live
from tests.support.scenario import Stage

#: Why these are reached by no kill: a sentence for each.
NOT_REACHED: dict[str, str] = (
    {
        f"network.{step}.{side}": "the guard pulls the cables by itself (guard.fence, guard.lift)"
        for step in ("cut", "uncut")
        for side in ("before", "after")
    }
    | {
        f"coordinator.{step}.{side}": "no job is touched; tests/multinode/test_trust_cluster.py kills it there"
        for step in ("join", "crl")
        for side in ("before", "after")
    }
    | {
        f"{step}.{side}": "needs a GPU; tests/gpu/test_faults.py kills it there, and tests/single/test_gpu_node.py some"
        for step in (*(f"worker.gpu.{step}" for step in ("precopy", "quiesce", "capture", "back", "fill")), "gpu.spawn")
        for side in ("before", "after")
    }
    | {
        f"{step}.{side}": "the lanes' job has no communicators; tests/multinode/test_nccl.py kills it there"
        for step in (
            *(f"coordinator.quiesce.{step}" for step in ("cut", "keep", "destroy", "rebuild", "open")),
            *(f"worker.nccl.{step}" for step in ("keep", "destroy", "part", "ids", "rebuild")),
            "coordinator.order.quiesce",
        )
        for side in ("before", "after")
    }
    | {
        f"coordinator.accept.{side}": "an etcd from a backup: tests/unit/test_restored.py has the decision"
        for side in ("before", "after")
    }
    | {
        f"{step}.{side}": "the stores here are folders; tests/multinode/test_remote_store.py kills there"
        for step in ("upload.packs", "upload.index", "upload.manifest", "coordinator.upload.complete")
        for side in ("before", "after")
    }
)

COORDINATOR, NODE, ANY, IDLE = "coordinator", "node", "", "idle"


class Case(NamedTuple):
    """One process dies at each of ``kills`` while ``scenario`` runs (again, until all were reached).

    ``role``: whose process; ``node`` is the first node of the long-lived job. ``restored``: the long-lived job may be
    another incarnation afterwards.
    """

    kills: tuple[str, ...]
    scenario: Callable[[Stage], None]
    role: str = COORDINATOR
    restored: bool = False
    tries: int = 4

    @property
    def label(self) -> str:
        names = sorted({kill.removesuffix(".before").removesuffix(".after") for kill in self.kills})
        return f"{' '.join(names)} [{self.role or 'any'}]"


def declared() -> frozenset[str]:
    """All failpoints of all daemons."""
    for module in ("coordinator.daemon", "worker.daemon", "worker.guard.main", "worker.guard.server"):
        importlib.import_module(f"moorage.{module}")
    return failpoints.declared()


def transitions() -> set[str]:
    """The failpoints that the transitions of the state machine must have."""
    return {f"{failpoint(*key)}.{side}" for key in TABLE for side in ("before", "after")}


def _cases(
    stems: str,
    scenario: Callable[[Stage], None],
    role: str = COORDINATOR,
    *,
    restored: bool = False,
    together: int = 1,
    tries: int = 4,
) -> Iterable[Case]:
    """Cases for failpoints with two sides; ``together`` stems share one run of the scenario."""
    names = stems.split()
    for start in range(0, len(names), together):
        kills = tuple(f"{stem}.{side}" for stem in names[start : start + together] for side in ("before", "after"))
        yield Case(kills, scenario, role, restored, tries)


def _attempt(*moves: str) -> str:
    return " ".join(f"job.attempt.{move}" for move in moves)


ATTEMPTS = [
    *_cases(
        "job.running-checkpointing coordinator.order.prepare barrier.start",
        live.checkpoint_surely,
        together=2,
    ),
    *_cases(
        _attempt(
            "none-preparing",
            "preparing-freezing",
            "freezing-sealing",
            "sealing-capturing",
            "capturing-persisting",
            "persisting-committing",
            "committing-committed",
        ),
        live.checkpoint_surely,
        together=2,
    ),
    *_cases(
        "coordinator.order.freeze coordinator.order.seal coordinator.order.capture barrier.outcome "
        "job.checkpointing-running store.manifest.global barrier.forget",
        live.checkpoint_surely,
        together=2,
    ),
    *_cases("coordinator.audit", live.checkpoint_surely),
    *_cases("job.note", live.two_checkpoints),
    *_cases(_attempt("preparing-settling", "settling-aborted"), live.refused("worker.prepare.record.before")),
    *_cases(_attempt("freezing-settling"), live.refused("worker.freeze.cgroup.before")),
    *_cases(_attempt("sealing-settling"), live.refused("worker.seal.network.before")),
    *_cases(_attempt("capturing-settling"), live.refused("worker.capture.dump.before")),
    *_cases("coordinator.order.resume", live.refused("worker.capture.dump.before")),
    *_cases(_attempt("persisting-settling"), live.refused("worker.persist.images.before")),
    *_cases(_attempt("committing-settling"), live.refused("store.manifest.global.before", "coordinator")),
    *_cases(
        "job.parking-running",
        live.refused("worker.capture.dump.before", verb="park"),
        restored=True,
    ),
]

JOURNEYS = [
    *_cases(
        "job.running-parking job.parking-parked job.parked-restoring",
        live.park_and_restore,
        restored=True,
        together=2,
    ),
    *_cases(
        "job.bringup.placing-loading job.bringup.loading-releasing job.restoring-running",
        live.park_and_restore,
        restored=True,
        together=2,
    ),
    *_cases(
        "coordinator.order.restore coordinator.order.release coordinator.order.kill coordinator.counter.vni",
        live.park_and_restore,
        restored=True,
        together=2,
    ),
    *_cases(
        "job.parking-restoring job.bringup.placing-fencing job.bringup.fencing-loading job.bringup.none-placing",
        live.move,
        restored=True,
        together=2,
    ),
    *_cases(
        "coordinator.cordon coordinator.drain.moves coordinator.drain.order coordinator.drain.note",
        live.drain,
        restored=True,
        together=4,
    ),
    *_cases("coordinator.order.examine coordinator.order.fit", live.move, restored=True, together=2),
    *_cases("job.running-restoring", live.restore, restored=True),
    *_cases("job.bringup.loading-placing", live.restore_elsewhere("worker.restore.rebuild.before"), restored=True),
    *_cases("job.bringup.releasing-placing", live.restore_elsewhere("worker.release.thaw.before"), restored=True),
    *_cases(_attempt("preparing-aborted"), live.overruled(brief.ORDER.format("prepare"), COORDINATOR), restored=True),
    *_cases(_attempt("freezing-aborted"), live.overruled(brief.ORDER.format("freeze"), COORDINATOR), restored=True),
    *_cases(_attempt("sealing-aborted"), live.overruled(brief.ORDER.format("seal"), COORDINATOR), restored=True),
    *_cases(
        _attempt("capturing-aborted") + " job.checkpointing-restoring",
        live.overruled(brief.ORDER.format("capture"), COORDINATOR),
        restored=True,
    ),
    *_cases(
        _attempt("persisting-aborted"),
        live.overruled("worker.persist.images.before", seconds="stall 3"),
        restored=True,
    ),
    *_cases(
        _attempt("committing-aborted"),
        live.overruled("store.manifest.global.before", COORDINATOR, seconds="stall 3"),
        restored=True,
    ),
]

ENDS = [
    *_cases(
        "job.none-pending job.pending-starting job.starting-running job.running-finishing job.ending.none-closing "
        "job.finishing-finished coordinator.order.start coordinator.order.finish coordinator.counter.slot",
        brief.finish,
        together=3,
    ),
    *_cases("job.finishing-failed", brief.fail),
    *_cases("job.checkpointing-finishing", brief.fail_under("checkpoint")),
    *_cases("job.parking-finishing", brief.fail_under("park")),
    *_cases("job.running-starting", brief.lost_before_first_checkpoint),
    *_cases("job.checkpointing-starting", brief.lost_under("checkpoint")),
    *_cases("job.parking-starting", brief.lost_under("park")),
    *_cases("job.starting-finishing", brief.no_such_command),
    *_cases(
        "job.running-stopping job.stopping-stopped job.ending.none-killing job.ending.killing-closing",
        brief.stop,
        together=2,
    ),
    *_cases("job.parking-stopping job.ending.none-fencing", brief.stop_with_checkpoint, together=2),
    *_cases("job.pending-stopping", brief.stop_pending),
    *_cases("job.starting-stopping", brief.stop_starting),
    *_cases("job.checkpointing-stopping", brief.stop_under("checkpoint", brief.ORDER.format("capture"))),
]

RETURNS = [
    *_cases("job.restoring-stopping", brief.stop_restoring),
    *_cases("job.parked-stopping", brief.stop_parked),
    *_cases("job.finished-restoring", brief.back_from("finished")),
    *_cases("job.failed-restoring", brief.back_from("failed")),
    *_cases("job.stopped-restoring", brief.back_from("stopped")),
    *_cases("job.restoring-starting", brief.cold_start),
    *_cases("job.restoring-parking", brief.hopeless_restore),
    *_cases("coordinator.checkpoint.pin", brief.pin),
    *_cases(
        "coordinator.checkpoint.forget coordinator.prune.generation store.prune.claim store.prune.condemn "
        "store.prune.barrier store.prune.copy store.prune.index store.prune.delete store.prune.record",
        brief.forget_and_prune,
        together=3,
    ),
    *_cases("store.pack", brief.forget_and_prune),
    *_cases("coordinator.job.archive coordinator.job.forget", brief.delete, together=2),
    Case(("coordinator.take-up.before", "barrier.election.elected"), live.restart_coordinator),
    *_cases("barrier.session.grant barrier.election.enter", live.restart_coordinator, together=2),
    *_cases("barrier.session.revoke barrier.election.resign", live.end_coordinator, together=2),
]

WORKERS = [
    *_cases(
        " ".join(
            f"worker.{step}"
            for step in (
                "prepare.record",
                "prepare.hooks",
                "freeze.cgroup",
                "freeze.drain",
                "seal.network",
                "capture.backlog",
                "capture.dump",
                "capture.layer",
                "capture.record",
                "vote.captured",
                "outcome.hooks",
                "outcome.backlog",
                "outcome.unseal",
                "outcome.thaw",
                "persist.images",
                "persist.layer",
                "persist.manifest",
                "vote.persisted",
            )
        ),
        live.checkpoint,
        ANY,
        together=2,
    ),
    *_cases(
        "barrier.vote.captured barrier.vote.persisted network.seal network.unseal layers.capture store.manifest.pod",
        live.checkpoint,
        ANY,
        together=2,
    ),
    *_cases("store.pack store.index", live.checkpoint, NODE),
    *_cases("barrier.abort", brief.late_outcome, ANY),
    *_cases("barrier.session.grant worker.register.put", live.restart_worker, NODE),
    *_cases("barrier.session.revoke", live.end_idle_worker, IDLE),
]

WORKERS_RESTORE = [
    *_cases(
        " ".join(
            f"worker.{step}"
            for step in (
                "restore.verify",
                "restore.network",
                "restore.fetch",
                "restore.layers",
                "restore.rebuild",
                "restore.backlog",
                "release.hooks",
                "release.unseal",
                "release.thaw",
                "kill.processes",
                "kill.network",
                "kill.layers",
            )
        ),
        live.move,
        ANY,
        restored=True,
        together=2,
    ),
    *_cases(
        "network.create network.remove network.reset_external layers.restore guard.spawn",
        live.move,
        ANY,
        restored=True,
        together=2,
    ),
    *_cases("worker.start.layers worker.start.network worker.start.guard", brief.start, ANY),
    *_cases(
        "worker.finish.logs worker.finish.results worker.finish.remove layers.writeback", brief.finish, ANY, together=2
    ),
    Case(("layers.writeback.file",), brief.finish, ANY),
    *_cases("store.object", brief.finish, ANY),
]

GUARDS = [
    *_cases("barrier.session.renew", live.wait, NODE),
    *_cases("guard.freeze guard.drain guard.checkpoint guard.thaw", live.checkpoint, ANY, together=2),
    *_cases("guard.adopt", live.kill_guards, ANY),
    *_cases("guard.restore", live.move, ANY, restored=True),
    *_cases("guard.start", brief.start, ANY),
    *_cases("guard.kill guard.ended", brief.stop, ANY),
]

#: Here nodes fall silent, so the leases are short.
SILENCE = [
    *_cases("barrier.session.renew", live.wait),
    *_cases("guard.fence guard.lift", live.blackout, ANY),
    *_cases("job.bringup.fencing-placing", live.lose_node_while_fencing, restored=True),
    *_cases("job.ending.closing-fencing", brief.lose_node_at_the_end),
    *_cases("job.restoring-parked", brief.restore_without_nodes),
]

LANES: dict[str, list[Case]] = {
    "attempts": ATTEMPTS[::2],
    "more attempts": ATTEMPTS[1::2],
    "journeys": JOURNEYS[::2],
    "more journeys": JOURNEYS[1::2],
    "ends": ENDS,
    "returns": RETURNS[::2],
    "more returns": RETURNS[1::2],
    "workers": WORKERS,
    "restores": WORKERS_RESTORE,
    "guards": GUARDS,
    "silence": SILENCE,
}


def covered() -> set[str]:
    return {kill for cases in LANES.values() for case in cases for kill in case.kills}
