"""NCCL in one pod: the proxy over each library that the job could open, the socket, and the pod's part in a cut.

Every function does nothing for a pod that can have no communicators.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moorage.errors import DeviceFailed, EnvironmentLacking, Unavailable
from moorage.nccl_quiesce import control
from moorage.v1 import worker_pb2
from moorage.worker import gpu_health, inventory, pod_user
from moorage.worker.agent_failpoints import step
from moorage.worker.layers.owner import acting_as, owner_of
from moorage.worker.nccl import libraries, sharing
from moorage.worker.nccl.pod import PodProcesses
from moorage.worker.pod_environment import rank_environment
from moorage.worker.pod_record import SavedNccl
from moorage.worker.preflight import Objection
from moorage.worker.sandbox import native, oci, podinit

if TYPE_CHECKING:
    from moorage.worker.pod import Pod

#: Seen by the pod's processes: the socket, and the real libraries below it.
FOLDER = "/.moorage-nccl"
SOCKET_FILE = "nccl.sock"
_COPIES = "nccl"
_BUILT, _VARIABLE = "intercept/nccl/moorage-nccl-dir", "MOORAGE_LIBNCCL_PROXY"
_PHASES_STILL = ("frozen", "sealed", "captured")


def has(pod: Pod) -> bool:
    """Whether the pod can have communicators."""
    spec = pod.spec
    return control.has_communicators(spec.env, gpus=spec.gpus_per_pod, pods=spec.pods, ranks_per_pod=spec.ranks_per_pod)


def _folder(pod: Pod) -> Path:
    return pod.folder / "nccl"


def processes(pod: Pod) -> PodProcesses:
    """Those of the pod, with what an earlier worker knew of them."""
    if pod.nccl is None:
        pod.nccl = PodProcesses(
            _folder(pod) / SOCKET_FILE, pod.record.incarnation, pod.label, on_new=lambda: _note(pod)
        )
        pod.nccl.expected = dict(pod.record.nccl.processes)
        pod.nccl.kept = pod.record.nccl.kept
        pod.nccl.renewed = dict(pod.record.nccl.renewed)
        pod.nccl.let_go = {n: (tuple(again), tuple(widowed)) for n, again, widowed in pod.record.nccl.let_go}
    return pod.nccl


def _note(pod: Pod) -> None:
    """Write down who is there: a worker that follows must not take a process that is not back yet for none."""
    if pod.nccl is not None:
        pids, told = pod.nccl.known()
        let_go = [(n, list(again), list(widowed)) for n, (again, widowed) in sorted(told.items()) if again or widowed]
        renewed = sorted(pod.nccl.renewed.items())
        pod.record.nccl = SavedNccl(sorted(pids.items()), let_go, pod.record.nccl.files, pod.nccl.kept, renewed)
        pod.save()


# -- bringing the pod up


def lay(pod: Pod, upper: Path) -> None:
    """Find the job's libraries and put a copy of the proxy for each into the pod's upper layer.

    Raises `EnvironmentLacking` for a pod with GPUs on a node without the proxy: no checkpoint could be made of it.
    """
    if not has(pod):
        return
    spec = pod.spec
    if (proxy := _proxy()) is None:
        if spec.gpus_per_pod:
            native.find(libraries.NAME, _BUILT, variable=_VARIABLE)
        return  # its ranks bring a stand-in of their own
    user = pod_user.resolve(spec)
    environment = {**user.environment(), **rank_environment(spec, "", pod.record.pod, 0, "")}
    root = Path(spec.image) if spec.image else Path("/")
    with acting_as(owner_of(user.uid, user.gid, user.groups)):  # what the user may not reach the job cannot open
        found = libraries.find(pod_user.command_paths(spec), environment, root=root)
    if found:
        for place, path in enumerate(found):
            copy = upper / podinit.FOLDER.lstrip("/") / _COPIES / str(place) / Path(path).name
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A copy each: the loader takes two paths to one inode for one library.
            shutil.copyfile(proxy, copy)
            copy.chmod(0o755)
    pod.record.nccl = SavedNccl(files=found)
    pod.log.info("NCCL", libraries=found)


def _proxy() -> Path | None:
    try:
        return native.find(libraries.NAME, _BUILT, variable=_VARIABLE)
    except EnvironmentLacking:
        return None


def come_back(pod: Pod, extra: dict[str, Any]) -> None:
    """Take over what the manifest says."""
    if "nccl" in extra:
        pod.record.nccl = msgspec.convert(extra["nccl"], SavedNccl)
        pod.nccl = None


def real_files(pod: Pod) -> list[Path]:
    """The libraries that the proxy stands over, as this host has them."""
    root = Path(pod.spec.image) if pod.spec.image else Path("/")
    return [root / path.lstrip("/") for path in pod.record.nccl.files] if has(pod) else []


def container(pod: Pod, real: Sequence[Path]) -> list[oci.Bind]:
    """Mounts of the pod's container: the folder, in it each real library, over each library its copy of the proxy.

    ``real``: where the real libraries can be had, in the order of `real_files`.
    """
    if not has(pod):
        return []
    folder = _folder(pod)
    folder.mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o755)
    binds = [oci.Bind(source=folder, destination=FOLDER)]
    for place, (path, source) in enumerate(zip(pod.record.nccl.files, real, strict=True)):
        below = path.lstrip("/")
        target = folder / below
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        target.touch(0o644)
        copy = pod.layers.root / podinit.FOLDER.lstrip("/") / _COPIES / str(place) / Path(path).name
        binds.append(oci.Bind(source=source, destination=f"{FOLDER}/{below}", read_only=True))
        binds.append(oci.Bind(source=copy, destination=path, read_only=True))
    return binds


def environment(pod: Pod) -> dict[str, str]:
    """A host's identity that stays the same when the pod moves: NCCL remembers it for a process's life."""
    return {"NCCL_HOSTID": f"moorage-{pod.record.job}-{pod.record.pod}"} if has(pod) else {}


async def listen(pod: Pod) -> None:
    """Let the pod's processes come (back). The pod runs, or is about to for the first time."""
    if has(pod) and not pod.gone:
        _folder(pod).mkdir(mode=0o755, exist_ok=True)
        await processes(pod).listen()


async def adopt(pod: Pod) -> None:
    """The same for a worker that has found the pod: not while the pod stands still for a capture."""
    if pod.record.phase not in (*_PHASES_STILL, "restored"):
        await listen(pod)


async def detach(pod: Pod) -> None:
    """The pod is gone. Raises nothing."""
    if pod.nccl is not None:
        await pod.nccl.close()
        pod.nccl = None


# -- preflight


def ends(pod: Pod) -> frozenset[int]:
    """Inode numbers of the worker's ends of the connections with the pod's processes, which are no tie."""
    return pod.nccl.ends() if pod.nccl is not None else frozenset()


async def look(pod: Pod) -> list[Objection]:
    """What of the pod's NCCL cannot be carried over a checkpoint."""
    if not has(pod) or pod.gone or pod.record.phase in _PHASES_STILL:
        return []
    objections = await asyncio.to_thread(_strangers, pod)
    try:
        found = await processes(pod).refusals()
        objections += await _crowded(pod)
    except (Unavailable, DeviceFailed) as error:
        return [*objections, Objection("NCCL", error.message, error.hint or "try again", type(error).__name__)]
    for process, refusal in found:
        communicator = f", communicator {refusal.communicator}" if refusal.communicator else ""
        objections.append(
            Objection(f"{process}{communicator}, {refusal.api}", refusal.why, "do without it, or end it first")
        )
    return objections


async def _crowded(pod: Pod) -> list[Objection]:
    """Ranks that share a GPU where the driver cannot bear it. Raises `Unavailable`, `DeviceFailed`."""
    if not pod.record.gpus:
        return []
    members = await processes(pod).members()
    if len(members) < 2:
        return []
    users = await asyncio.to_thread(sharing.users, gpu_health.library(), pod.record.gpus)
    return sharing.objections(inventory.driver(), users, members)


def _strangers(pod: Pod) -> list[Objection]:
    """Processes with an NCCL that the proxy does not stand over."""
    if _proxy() is None:
        return []
    found = libraries.uncovered(pod.processes(), pod.record.nccl.files, real=FOLDER)
    return [
        Objection(
            f"process {pid} uses {path}",
            "this NCCL was not there when the job started, so nobody can stop it at a safe point",
            "have it installed before the job starts, or name it in LD_LIBRARY_PATH",
        )
        for pid, path in found
    ]


# -- a checkpoint


async def part(pod: Pod) -> None:
    """Let go of the pod's processes, so that no connection is open when it is captured. Idempotent."""
    if not has(pod) or pod.gone:
        return
    own = processes(pod)
    async with step("worker.nccl.part"):
        if own.runs.is_set():
            await own.part()
            _note(pod)


def saved(pod: Pod) -> dict[str, Any]:
    """What the manifest is to say."""
    return {"nccl": msgspec.to_builtins(pod.record.nccl)} if has(pod) else {}


async def quiesce(pod: Pod, request: worker_pb2.QuiesceRequest) -> worker_pb2.QuiesceReply:
    """One step of the cut, as the coordinator asks. Raises `Unavailable`, `DeviceFailed`, `NotFound`."""
    if request.step == "round" and pod.nccl is not None:  # also of a pod that has exited meanwhile: its counts stand
        return worker_pb2.QuiesceReply(answers=await pod.nccl.round(request.orders, request.seconds))
    if not has(pod) or pod.gone:
        return worker_pb2.QuiesceReply(status=pod.status())
    own = processes(pod)
    if request.step in ("look", "back"):
        if request.step == "look" and pod.record.phase in _PHASES_STILL:
            return worker_pb2.QuiesceReply(status=pod.status(), parted=True)
        await _runs(pod, own, request.seconds)
        await own.back(request.seconds, lambda: asyncio.to_thread(pod.inner_pids))
        answers = {number: control.encode(process) for number, process in (await own.look()).items()}
        return worker_pb2.QuiesceReply(status=pod.status(), answers=answers)
    if request.step == "renew":
        await own.renew(control.decode(request.orders[0], control.Renewed))
        _note(pod)
        return worker_pb2.QuiesceReply(status=pod.status())
    async with step(f"worker.nccl.{request.step}"):
        answers = await own.step(request.step, request.orders, request.seconds)
        _note(pod)
    return worker_pb2.QuiesceReply(status=pod.status(), answers=answers)


async def _runs(pod: Pod, own: PodProcesses, seconds: float) -> None:
    """Wait until the pod runs again after a capture, or is gone."""
    waits = [asyncio.ensure_future(own.runs.wait()), asyncio.ensure_future(pod.over.wait())]
    try:
        done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if not done:
        raise Unavailable(f"{pod.label} does not run again: it is {pod.record.phase}")
