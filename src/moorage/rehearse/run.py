"""Carrying out a rehearsal: two runs, the disturbances of the second, and the comparison."""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import moorage
from moorage.errors import Conflict, JobFailed, MoorageError
from moorage.rehearse import compare, plot, report, schedule
from moorage.rehearse.report import Done, Report
from moorage.rehearse.spec import Rehearsal

if TYPE_CHECKING:
    from moorage.coordinator.client import Client, Job, JobInfo
    from moorage.v1.types_pb2 import JobSpec

REFERENCE, REHEARSED = "reference", "rehearsed"
Say = Callable[[str], None]


def rehearse(
    client: Client, spec: JobSpec, plan: Rehearsal, folder: Path, *, say: Say, template: Path | None
) -> Report:
    """Run ``spec`` twice below ``folder`` and compare. ``template``: a folder that both runs begin with a copy of.

    Writes ``report.json`` and ``report.svg`` there. Raises `JobFailed` when a run does not end with exit code 0, and
    what the cluster refuses.
    """
    runs = {side: folder / side for side in (REFERENCE, REHEARSED)}
    for run in runs.values():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(template, run) if template else run.mkdir(parents=True)
    name = spec.name or "job"
    say(f"{name} runs undisturbed")
    reference = _wait(_submit(client, spec, runs[REFERENCE], f"{name}-{REFERENCE}"))
    seconds = max(0.1, reference.ended - reference.started)
    say(f"{name} took {seconds:.1f} s; it runs again, and is disturbed")
    job = _submit(client, spec, runs[REHEARSED], f"{name}-{REHEARSED}")
    done = _disturb(client, job, plan, seconds, ranks=reference.ranks, say=say)
    info = _wait(job)
    sides = [_reader(runs[side]) for side in (REFERENCE, REHEARSED)]
    found = compare.compare(plan.outputs, reference.ranks, sides[0], sides[1])
    first = compare.first(found)
    kinds = [event.kind for event in job.events()]
    restored = sum(not one.note and one.action != "checkpoint" for one in done)
    result = Report(
        job=name,
        equal=all(one.equal for one in found),
        proved=restored > 0 and kinds.count("restore.done") >= restored and "job.restarted" not in kinds,
        seed=plan.seed,
        ranks=reference.ranks,
        reference_seconds=round(seconds, 3),
        rehearsed_seconds=round(info.ended - info.started, 3),
        disturbances=tuple(done),
        outputs=tuple(found),
        first=first,
        when=report.when(first, done),
        environment=_environment(client, spec, done),
        plot=str(folder / "report.svg"),
    )
    panels = report.series(plan.outputs, found, reference.ranks, lambda side, path, rank: sides[side](path, rank))
    title = f"{name}: {'equal' if result.equal else 'different'}, seed {plan.seed}"
    (folder / "report.svg").write_text(plot.svg(title, panels, report.marks(done)))
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return result


def _submit(client: Client, spec: JobSpec, folder: Path, name: str) -> Job:
    own = type(spec)()
    own.CopyFrom(spec)
    own.name, own.working_directory = name, str(folder.absolute())
    job = client.submit(own, if_exists="replace")
    job.until(lambda info: info.phase == "running" or info.over)
    return job


def _wait(job: Job) -> JobInfo:
    info = job.wait()
    if info.phase != "finished":
        raise JobFailed(
            f"job {info.name} did not finish: {info.phase}, {info.reason}",
            f"`moorage logs {info.name}` says more; a rehearsal needs a job that ends with 0",
        )
    return info


def _reader(folder: Path) -> compare.Read:
    def read(path: str, rank: int) -> bytes | None:
        try:
            return (folder / path.replace("{rank}", str(rank))).read_bytes()
        except OSError:
            return None

    return read


def _disturb(client: Client, job: Job, plan: Rehearsal, seconds: float, *, ranks: int, say: Say) -> list[Done]:
    began = time.monotonic()
    done: list[Done] = []
    for one in schedule.disturbances(plan):
        left = one.at * seconds - (time.monotonic() - began)
        over = _over(job, left)
        at = round(time.monotonic() - began, 3)
        try:
            if over:
                raise Conflict("the job had ended")
            result = _one(client, job, one.action, plan, at, ranks)
        except MoorageError as error:
            result = Done(action=one.action, at=at, note=error.message)
        say(f"at {at:.1f} s: {one.action}" + (f" did not come about: {result.note}" if result.note else ""))
        done.append(result)
    return done


def _over(job: Job, seconds: float) -> bool:
    """Wait so long, or until the job is over; whether it is."""
    try:
        return job.until(lambda info: info.over or info.phase == "finishing", timeout=max(0.001, seconds)).over
    except TimeoutError:
        return False


def _one(client: Client, job: Job, action: str, plan: Rehearsal, at: float, ranks: int) -> Done:
    reached = _steps(job, plan, ranks)
    if action == "checkpoint":
        made = job.checkpoint()
        return Done(
            action=action, at=at, checkpoint=made.id, reached=reached, pause_seconds=round(made.pause_seconds, 3)
        )
    here = {pod.node for pod in job.status().pods}
    if action == "back":
        info = job.restore()
    else:
        free = [node.node for node in client.nodes() if node.live and node.ready and not node.cordoned]
        info = job.move([node for node in free if node not in here] or free)
    checkpoint = client.checkpoints(job.id)[-1].id
    return Done(
        action=action,
        at=at,
        checkpoint=checkpoint,
        nodes=tuple(pod.node for pod in info.pods),
        reached=reached,
        resumed=_steps(job, plan, ranks),
        restore_seconds=round(info.last_restore_seconds, 3),
    )


def _steps(job: Job, plan: Rehearsal, ranks: int) -> tuple[int, ...]:
    """The last step that each rank has written of; -1 where no declared output tells."""
    lines = next((output for output in plan.outputs if output.kind == "lines" and "{rank}" in output.path), None)
    if lines is None:
        return ()
    found = []
    with tempfile.TemporaryDirectory(prefix="moorage-rehearse-") as folder:
        for rank in range(ranks):
            step = -1
            with contextlib.suppress(MoorageError, OSError):
                path = lines.path.replace("{rank}", str(rank))
                job.pull(path, to=Path(folder))
                whole = (Path(folder) / Path(path).name).read_text(errors="replace").rpartition("\n")[0].splitlines()
                step = compare.step_of(lines, whole[-1], len(whole)) if whole else -1
            found.append(step)
    return tuple(found)


def _environment(client: Client, spec: JobSpec, done: list[Done]) -> dict[str, Any]:
    """What the result depends on: versions, nodes, and what the checkpoints were made with."""
    nodes = {node.node: msgspec.json.decode(bytes(node.fingerprint)) for node in client.nodes() if node.live}
    for fingerprint in nodes.values():
        fingerprint.pop("cpu_features", None)  # some hundred words; `moorage show NODE` has them
    software: dict[str, str] = {}
    newest = next((one for one in reversed(done) if one.nodes and not one.note), None)
    if newest is not None:
        with contextlib.suppress(MoorageError):
            lines = client.compat(newest.checkpoint, newest.nodes[0]).lines
            software = {line.rule: line.wanted for line in lines if line.wanted}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "moorage": moorage.__version__,
        "python": sys.version.split()[0],
        "client": platform.platform(),
        "command": list(spec.command),
        "pods": spec.pods,
        "ranks_per_pod": spec.ranks_per_pod,
        "nodes": nodes,
        "checkpoint": software,
    }
