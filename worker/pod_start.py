"""Start a pod: root file system, network, bundle, guard, container."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from moorage.errors import MoorageError
from moorage.worker import hooks, pod_gpu, pod_guard, pod_nccl, pod_user
from moorage.worker.agent_failpoints import step
from moorage.worker.layers import PodLayers
from moorage.worker.layers.owner import acting_as, owner_of
from moorage.worker.pod import Pod
from moorage.worker.pod_environment import place, rank_command, rank_environment
from moorage.worker.pod_phase import Change
from moorage.worker.pod_steps import Timings, all_ended
from moorage.worker.sandbox import criu, oci, podinit


async def start(pod: Pod) -> Timings:
    """From nothing to running; returns seconds by step. On failure the pod is ``failed`` and nothing of it stands.

    Raises `UsageError` (command, user or folder that does not exist), `EnvironmentLacking`, `Conflict`.
    """
    timings: Timings = {}
    began = time.monotonic()
    try:
        user = pod_user.resolve(pod.spec)
        pod.opened = await asyncio.to_thread(pod_user.Opened, pod.spec, user)
        await pod_gpu.attach(pod)
        await all_ended(_root(pod, user), _network(pod, sealed=False))
        await pod_nccl.listen(pod)
        timings["prepare"] = time.monotonic() - began
        pod.check_alive()
        async with step("worker.start.guard"):
            await pod_guard.spawn(pod)
            pod.check_alive()
            done = await pod_guard.run_bundle(pod)
        pod_guard.take_status(pod, done.status)
        timings.update(done.timings)
    except (MoorageError, OSError) as error:
        await pod_guard.undo(pod)
        pod.change(Change.BROKE, str(error))
        raise
    finally:
        pod.close_opened()
    pod.change(Change.STARTED)
    timings["start"] = time.monotonic() - began
    return timings


async def _network(pod: Pod, *, sealed: bool) -> None:
    async with step("worker.start.network"):
        await asyncio.to_thread(pod.network.create, sealed=sealed)


async def _root(pod: Pod, user: pod_user.User) -> None:
    async with step("worker.start.layers"):
        await asyncio.to_thread(_lay_root, pod, user)


def _lay_root(pod: Pod, user: pod_user.User) -> None:
    spec = pod.spec
    owner = owner_of(user.uid, user.gid, user.groups)
    with acting_as(owner):
        needed = pod_user.command_paths(spec)
    layers = PodLayers.plan(
        pod.folder,
        image=Path(spec.image) if spec.image else None,
        working_directory=spec.working_directory or "/",
        interpreters=needed,
        user_mounts=[mount.destination for mount in spec.mounts],
        hidden=pod.node.hidden(),
        owner=owner,
    )
    pod.layers = layers
    podinit.install(layers.upper, init_config(pod, user))
    pod_gpu.lay_proxy(pod, layers.upper)
    pod_nccl.lay(pod, layers.upper)
    layers.mount(pod.opened.image if pod.opened else None)
    write_names(pod)
    hooks.lay(pod)
    write_bundle(pod, user)


def hostname(pod: Pod) -> str:
    """The pod's host name: the job's name and the pod's number, shortened to what a host name may be."""
    name = "".join(letter if letter.isalnum() else "-" for letter in pod.spec.name.lower()).strip("-") or "job"
    return f"{name[:50].strip('-')}-{pod.record.pod}"


def write_names(pod: Pod) -> None:
    """``/etc/hostname``, ``/etc/hosts`` with all pods of the job, ``/etc/resolv.conf`` of this host."""
    own = hostname(pod)
    stem = own.rpartition("-")[0]
    pod.layers.write_identity(
        hostname=own,
        hosts=pod.network.hosts({member.pod: f"{stem}-{member.pod}" for member in pod.record.members().members}),
        resolv_conf=pod.network.resolv_conf(),
    )


def init_config(pod: Pod, user: pod_user.User) -> podinit.InitConfig:
    """What the pod's init starts."""
    spec, record = pod.spec, pod.record
    ranks = [
        podinit.Rank(
            rank=place(spec, record.pod, local).rank,
            argv=rank_command(spec, local),
            env=rank_environment(spec, record.job, record.pod, local, pod.network.master_address),
        )
        for local in range(max(1, spec.ranks_per_pod))
    ]
    return podinit.InitConfig(
        ranks=ranks,
        cwd=spec.working_directory or "/",
        env={**user.environment(), **pod_gpu.environment(pod), **pod_nccl.environment(pod)},
        uid=user.uid,
        gid=user.gid,
        groups=user.groups,
        events=hooks.EVENTS,
        hooks=dict(spec.hooks),
    )


def write_bundle(pod: Pod, user: pod_user.User) -> None:
    """The OCI configuration of the pod. The layers must be planned, the network need not stand yet."""
    spec, layers = pod.spec, pod.layers
    binds = [oci.Bind(source=bind.source, destination=bind.destination) for bind in layers.binds]
    sources = real = pod_nccl.real_files(pod)
    if pod.opened is not None:
        for path in real:
            pod.opened.add(path, user)
        sources = pod.opened.bind(pod.node.sources / pod.container)
    binds += [
        oci.Bind(source=source, destination=mount.destination, read_only=mount.read_only)
        for source, mount in zip(sources, spec.mounts, strict=False)
    ]
    gpu_binds, gpu_devices = pod_gpu.container(pod)
    binds += [*gpu_binds, *pod_nccl.container(pod, sources[len(sources) - len(real) :])]
    pod.node.runc_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = oci.PodConfig(
        root=layers.root,
        netns=pod.network.netns_path,
        hostname=hostname(pod),
        cgroup=pod.cgroup,
        argv=podinit.argv(),
        criu_config=pod.folder / criu.CONFIG_FILE,
        uid=user.uid,
        shm_bytes=spec.shm_bytes,
        binds=binds,
        # A user's mount may get here by a symlink, and pid 1 is root's. From outside the root, where that would lie.
        init=oci.Bind(source=layers.upper / podinit.FOLDER.lstrip("/"), destination=podinit.FOLDER, read_only=True),
        devices=gpu_devices,
        cpus=spec.cpus,
        memory_bytes=spec.memory_bytes,
    )
    oci.write_bundle(pod.folder, config)
