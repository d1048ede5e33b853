"""The picture of nodes and jobs that the planner of drains looks at, taken from what the leader knows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from moorage.compat import Gpu, JobFingerprint, NodeFingerprint, judge, node_from
from moorage.coordinator.capacity import has, need_of
from moorage.coordinator.drain import selector
from moorage.coordinator.drain.model import Fits, JobView, NodeView
from moorage.errors import NotFound, UsageError
from moorage.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

#: The job is on its way out of these by itself.
_ENDING = frozenset({"finishing", "stopping"})


def nodes(leader: Leader) -> list[NodeView]:
    """All nodes that were ever seen in this term."""
    return [
        NodeView(
            node=name,
            live=name in leader.nodes.live,
            ready=record.ready,
            cordoned=name in leader.cordons,
            has=has(slots=record.slots, gpus=len(record.gpus), cpus=record.cpus, memory=record.memory_bytes),
            driver=record.driver,
            labels=record.labels,
        )
        for name, record in sorted(leader.nodes.known.items())
    ]


def job(leader: Leader, one: Job) -> JobView:
    """One job."""
    state = one.state
    purpose = state.attempt.purpose if state.attempt is not None and state.attempt.kind == "stop" else ""
    return JobView(
        job=one.id,
        name=state.name,
        seats=leader.seats(one),
        need=need_of(one.spec),
        allowed=tuple(one.spec.nodes),
        ends=state.phase in _ENDING or purpose in ("park", "stop"),
    )


def jobs(leader: Leader) -> list[JobView]:
    """All jobs that have pods."""
    return [job(leader, one) for one in leader.jobs.values() if not one.state.over and leader.seats(one)]


def fits(leader: Leader) -> Fits:
    """Whether what is known of a node suffices for the pods of a job, by the nodes that they run on now.

    The files are compared when the job moves: to read them for every pair would take long.
    """
    # Nodes of a fleet are mostly alike: each pair of kinds is judged once, or hundreds of nodes would take minutes.
    kinds: list[NodeFingerprint] = []
    numbers: dict[NodeFingerprint, int] = {}
    kind_of: dict[str, int] = {}
    for name, record in leader.nodes.known.items():
        if (found := node_from(record.fingerprint)) is None:
            continue
        found = msgspec.structs.replace(
            found, gpus=tuple(Gpu(model=g.model, memory_bytes=g.memory_bytes) for g in found.gpus)
        )
        if found not in numbers:
            numbers[found] = len(kinds)
            kinds.append(found)
        kind_of[name] = numbers[found]

    @functools.cache
    def misfit(here: int, there: int, gpus: int) -> str:
        node = kinds[here]
        verdict = judge(JobFingerprint(node=node, gpus=node.gpus[:gpus]), kinds[there])
        return "" if verdict.fits else verdict.summary

    def reason(job: JobView, node: NodeView) -> str:
        there = kind_of.get(node.node)
        for source in dict.fromkeys(job.seats):
            here = kind_of.get(source)
            if here is None or there is None:
                continue
            if why := misfit(here, there, job.need.gpus):
                return why
        return ""

    return reason


def choose(leader: Leader, choice: pb.NodeChoice) -> tuple[str, ...]:
    """The nodes that are meant, in the order named, else by name. Raises `NotFound`, `UsageError`."""
    if not (choice.nodes or choice.selector or choice.driver):
        raise UsageError("no node is named", "name nodes, or choose them with -l SELECTOR or --on-driver VERSION")
    leader.cordons.require(choice.nodes)
    known = {view.node: view for view in nodes(leader)}
    matches = selector.parse(choice.selector)
    found = list(dict.fromkeys(choice.nodes)) or sorted(known)
    if choice.selector:
        found = [name for name in found if name in known and matches(known[name].labels)]
    if choice.driver:
        found = [name for name in found if name in known and selector.driver_matches(known[name].driver, choice.driver)]
    if not found:
        asked = {"-l": choice.selector, "--on-driver": choice.driver}
        told = " ".join(f"{flag} {value}" for flag, value in asked.items() if value)
        raise NotFound(f"no node matches {told}", "moorage show NODE prints a node's labels and driver")
    return tuple(found)
