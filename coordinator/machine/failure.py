"""When something breaks that nobody asked to end."""

from __future__ import annotations

from moorage.coordinator.machine import attempt, bringup, ending
from moorage.coordinator.machine.events import Hung, NodeLost, PodExited, PodFailed
from moorage.coordinator.machine.state import BringUp, Ending, FailureKind, Trouble
from moorage.coordinator.machine.turn import Turn

_TOLD = {"rank": "rank.failed", "hang": "job.hung", "pod": "pod.lost", "node": "node.lost"}


def running(t: Turn) -> bool:
    """Whether the pods of the present incarnation are at work (or frozen for an attempt)."""
    state = t.state
    if state.phase in ("running", "checkpointing"):
        return True
    return state.phase == "parking" and state.attempt is not None


def pod_exited(t: Turn, event: PodExited) -> None:
    """A pod's ranks have all exited."""
    state = t.state
    coming = state.bringup is not None and state.bringup.step in ("loading", "releasing")
    if event.pod in state.exits or not (coming or running(t)):
        return
    t.set(exits={**state.exits, event.pod: event.code})
    if coming:
        return  # judged when all pods stand
    if event.code:
        rank = event.detail or f"pod {event.pod}"
        trouble(t, "rank", f"{rank} exited with {event.code}", exit_code=event.code)
    elif len(t.state.exits) == state.pods:
        all_ended(t)


def all_ended(t: Turn) -> None:
    """Every pod has exited with 0. What is being stored is stored first."""
    now = t.state.attempt
    if now is not None and now.step in ("persisting", "committing"):
        return
    if now is not None:
        attempt.leave(t, "the job has ended")
    ending.all_exited(t)


def judge_exits(t: Turn) -> None:
    """Pods may have exited while others were still brought up: judge that now that the job runs."""
    codes = t.state.exits
    if failed := {pod: code for pod, code in codes.items() if code}:
        pod, code = min(failed.items())
        trouble(t, "rank", f"pod {pod} exited with {code}", exit_code=code)
    elif len(codes) == t.state.pods:
        all_ended(t)


def pod_failed(t: Turn, event: PodFailed) -> None:
    """A pod is gone or broken."""
    state = t.state
    if event.pod in state.exits:
        return
    if running(t):
        node = state.seats[event.pod].node
        trouble(t, "pod", f"pod {event.pod} on {node} is lost: {event.reason}", node=node)
    elif state.bringup is not None and state.bringup.step == "releasing":
        bringup.broke(t, event.pod, event.reason)
    elif state.bringup is not None and state.bringup.step == "loading" and event.pod not in state.broken:
        # The answer to the order says more: whether another node would help, or none.
        t.set(broken={**state.broken, event.pod: event.reason})


def hung(t: Turn, event: Hung) -> None:
    """Nothing moves. Frozen pods are expected not to."""
    if t.state.phase == "running" and t.state.trouble is None:
        trouble(t, "hang", event.reason)


def node_lost(t: Turn, event: NodeLost) -> None:
    """A node's registration is gone."""
    if event.node not in t.state.nodes:
        return
    if running(t):
        if t.state.trouble is None or t.state.trouble.kind != "node":
            trouble(t, "node", f"node {event.node} was lost", node=event.node)
    elif t.state.bringup is not None:
        bringup.node_lost(t, event.node)


def trouble(t: Turn, kind: FailureKind, why: str, *, exit_code: int | None = None, node: str = "") -> None:
    """Something failed in a running job: go back, or wait for the checkpoint that is just being stored."""
    found = Trouble(kind=kind, why=why, exit_code=exit_code, node=node)
    t.say(_TOLD[kind], f"job {t.state.name}: {why}", node=node)
    now = t.state.attempt
    storing = now is not None and (
        now.step == "committing" or (now.step == "persisting" and now.kind == "resume" and kind != "node")
    )
    if storing:
        # What is captured is newer than what is committed, and all of it is on its way to the store.
        if t.state.trouble is None:
            t.set(trouble=found)
        return
    recover(t, found)


def recover(t: Turn, found: Trouble) -> None:
    """Do what the policy says."""
    state = t.state
    verdict = t.policies.failure.decide(
        state.policy,
        kind=found.kind,
        restarts=state.restarts,
        in_row=state.failures_in_row,
        has_checkpoint=bool(state.base),
    )
    attempt.leave(t, found.why)
    if verdict.action == "fail":
        reason = f"{found.why}; {verdict.why}"
        ending.begin(t, Ending(verdict="failed", step="killing", reason=reason, exit_code=found.exit_code))
        return
    t.set(
        restarts=state.restarts + 1,
        failures_in_row=state.failures_in_row + (found.kind != "node"),
    )
    checkpoint = state.base if verdict.action == "restore" else ""
    if not checkpoint:
        t.set(base="")  # what runs from now on descends from none
    bringup.begin(t, BringUp(cause="failure", checkpoint=checkpoint, ordered=t.now), found.why)
