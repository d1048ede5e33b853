"""From a plan to running pods: place, raise the incarnation, fence, start or restore, release.

The incarnation is raised in the transaction that holds the new placement; nothing of it is ordered before every older
pod is known to be gone. A failure excludes the node and begins again; when no node is left the job is parked, its
checkpoint untouched (or has failed, if it was never checkpointed).
"""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine import ending, failure
from moorage.coordinator.machine.events import Done, Failed, Placed, Unplaceable
from moorage.coordinator.machine.instructions import Release
from moorage.coordinator.machine.state import BringUp, Ending
from moorage.coordinator.machine.turn import Turn

#: Errors that no other node would cure.
HOPELESS = frozenset({"UsageError", "Refused", "CorruptData", "NewerVersion", "NotFound", "Forbidden"})


def begin(t: Turn, plan: BringUp, why: str) -> None:
    """Take up ``plan``; the job must not be in an attempt any more."""
    t.set(error_kind="", hint="")
    t.begin_bringup(plan)
    t.phase("restoring" if plan.checkpoint else "starting", why)


def placed(t: Turn, event: Placed) -> None:
    """There is a seat for every pod."""
    state = t.state
    t.set(slot=state.slot or event.slot, origin=_current(t).checkpoint)
    t.raise_incarnation(event.seats, event.vni)
    if t.state.fencing:
        where = ", ".join(dict.fromkeys(target.node for target in t.state.fencing))
        t.bringup_step("fencing", f"first nothing older may run on {where}", waiting_since=0.0)
    else:
        t.bringup_step("loading", "nothing older can run", waiting_since=0.0)
    if state.phase == "pending":
        t.phase("starting")


def unplaceable(t: Turn, event: Unplaceable) -> None:
    """No placement now. Somebody who asked is told; a failed job waits a while for a node."""
    plan = _current(t)
    if t.state.phase == "pending":
        t.set(reason=f"waits for nodes: {event.reason}")
        return
    unfit = event.error_kind == "Incompatible"
    if not plan.exclude:
        plan = msgspec.structs.replace(
            plan, misfits=unfit, error_kind=event.error_kind or "NoCapacity", hint=event.hint
        )
    if plan.cause != "failure" or plan.exclude:
        t.set(bringup=plan)
        why = f"{plan.trouble}; {event.reason}" if plan.trouble else event.reason
        give_up(t, why, plan.error_kind, plan.hint)
        return
    waiting = msgspec.structs.replace(plan, waiting_since=plan.waiting_since or t.now)
    t.set(bringup=waiting, reason=f"waits for nodes: {event.reason}")
    if not plan.waiting_since:
        t.say("restore.waiting", f"job {t.state.name} waits for a node: {event.reason}")


def fenced(t: Turn) -> None:
    """No older pod can run."""
    plan = t.state.bringup
    if plan is not None and plan.step == "fencing":
        t.bringup_step("loading", "the new pods are brought up")


def done(t: Turn, event: Done) -> None:
    """All pods are loaded, or released."""
    plan = _current(t)
    if t.state.broken:
        pod, reason = min(t.state.broken.items())
        broke(t, pod, reason)
        return
    if not isinstance(event.of, Release) and plan.checkpoint:
        t.bringup_step("releasing")
        return
    seconds = round(max(0.0, t.now - plan.ordered), 3)
    since = "the order" if plan.cause in ("user", "move") else "the failure"
    heartbeat = t.policies.heartbeat.next_due(t.state.policy, end=t.now, failed_attempts=0)
    t.phase("running", seconds=seconds, since=since)
    t.set(
        bringup=None,
        started=t.state.started or t.now,
        next_checkpoint=heartbeat,
        failed_attempts=0,
        last_restore_seconds=seconds if plan.checkpoint else t.state.last_restore_seconds,
    )
    failure.judge_exits(t)


def failed(t: Turn, event: Failed) -> None:
    """A pod could not be brought up."""
    what = "restored" if _current(t).checkpoint else "started"
    where = f"pod {event.pod} could not be {what} on {event.node}: " if event.node else ""
    why = f"{where}{event.message}"
    if event.fallback:
        t.set(base=event.fallback)
        t.say("restore.fallback", f"{event.message}; {event.fallback} takes its place")
        t.bringup_step("placing", f"{event.fallback} takes the place of another", checkpoint=event.fallback)
        return
    if event.error_kind in HOPELESS or not event.node:
        give_up(t, why, event.error_kind, event.hint)
    else:
        retry(t, why, event.node, event.error_kind, event.hint)


def broke(t: Turn, pod: int, reason: str) -> None:
    """A pod that had been brought up is gone before all of them run."""
    node = t.state.seats[pod].node
    retry(t, f"pod {pod} was lost on {node}: {reason}", node)


def node_lost(t: Turn, node: str) -> None:
    """A node of the new placement is gone; the others need not be avoided."""
    if _current(t).step != "placing":
        t.say("node.lost", f"node {node} was lost", node=node)
        t.bringup_step("placing", f"node {node} was lost", trouble=f"node {node} was lost")


def retry(t: Turn, why: str, node: str, error_kind: str = "", hint: str = "") -> None:
    """Choose again, without ``node``."""
    plan = _current(t)
    first = not plan.exclude
    t.bringup_step(
        "placing",
        why,
        exclude=tuple(dict.fromkeys((*plan.exclude, node))),
        trouble=why,
        error_kind=error_kind,
        hint=hint,
        misfits=error_kind == "Incompatible" and (first or plan.misfits),
    )


def patience_over(t: Turn) -> None:
    """No node has come."""
    plan = _current(t)
    give_up(t, t.state.reason, plan.error_kind or "NoCapacity", plan.hint)


def give_up(t: Turn, why: str, error_kind: str = "", hint: str = "") -> None:
    """There is no way left: cold start if the owner said so, park if there is a checkpoint, fail otherwise.

    ``error_kind`` and ``hint`` tell whoever waits what kind of failure it was, and the way out.
    """
    plan = _current(t)
    elastic = t.state.policy.elastic and plan.cause == "failure" and plan.checkpoint
    if elastic and error_kind not in ("", "NoCapacity"):
        t.set(base="")
        begin(t, BringUp(cause="failure", ordered=t.now, trace=plan.trace), f"{why}; restarts of torchrun go on anew")
        return
    allowed = t.state.policy.cold_start if plan.cold_start is None else plan.cold_start
    if plan.misfits and allowed and plan.checkpoint:
        t.set(base="")
        begin(t, BringUp(cause="failure", ordered=t.now, on=plan.on, trace=plan.trace), f"{why}; its owner allows that")
        return
    t.set(bringup=None, broken={}, error_kind=error_kind, hint=hint)
    if not plan.checkpoint:
        ending.begin(t, Ending(verdict="failed", step="killing", reason=why))
        return
    # Also with nothing to fence: who waits for this restore sees by the number that it is over.
    t.raise_incarnation()
    t.set(why_parked=why)
    if t.state.fencing:
        t.phase("parking", why)
    else:
        t.phase("parked", why)


def _current(t: Turn) -> BringUp:
    plan = t.state.bringup
    assert plan is not None
    return plan
