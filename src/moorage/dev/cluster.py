"""Start, change and take down embedded clusters. Blocking; needs root.

`up` writes down what it is about to make before it makes it, and `down` removes whatever of it is there, so a cluster
that was interrupted half-way, or whose supervisor was killed, is taken down like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from moorage.config import DEV_CLIENT_FILE
from moorage.dev import control, layout, network, ready, roles, sweep
from moorage.dev.layout import RUN_FOLDER, Cluster, Node
from moorage.dev.processes import Identity, end, end_all, naming
from moorage.errors import Conflict, EnvironmentLacking, MoorageError, NotFound, Unavailable, UsageError
from moorage.localsocket import path_of
from moorage.runtime import programs
from moorage.store_settings import StoreSettings
from moorage.worker import pod_user
from moorage.worker.agent_node import bound_sources
from moorage.worker.pod_staging import memory_root

Progress = Callable[[str], None]

READY_SECONDS = 60.0
MOST_NODES = 200


def _quiet(_: str) -> None:
    pass


def _require_root() -> None:
    if os.geteuid() != 0:
        raise EnvironmentLacking("a dev cluster needs root (namespaces, mounts, CRIU)", "run this with sudo")


def up(
    *,
    nodes: int = 3,
    name: str = "dev",
    state: Path | None = None,
    lease_seconds: int = 5,
    default: bool = True,
    use_rto_max: bool = True,
    slots: int = 0,
    etcd: int = 1,
    coordinators: int = 1,
    store: str = "",
    store_settings: StoreSettings | None = None,
    gpus: Sequence[Sequence[str]] = (),
    on_network: Callable[[Cluster], None] = lambda cluster: None,
    ready_seconds: float = READY_SECONDS,
    environment: Mapping[str, str] | None = None,
    progress: Progress = _quiet,
) -> Cluster:
    """Start a cluster and wait until it is ready.

    ``etcd`` and ``coordinators``: how many of each. ``store`` and ``store_settings``: as in the daemons' settings
    (default: a folder of the cluster's own); ``{gateway}`` in an endpoint stands for the machine's address on the
    cluster's network, and ``on_network`` is called once that stands, before any process of the cluster starts.

    ``default``: let `moorage` without further settings use it (the link `DEV_CLIENT_FILE`). ``environment`` is added to
    that of all its processes. ``use_rto_max`` and ``slots`` are those of `WorkerConfig`, so is ``gpus``, of each node
    in turn: without it every node has all GPUs of the machine. Raises `Conflict` if a cluster of that name is there,
    `UsageError`, `EnvironmentLacking`; `MoorageError` if a part does not come up, after everything was removed again.
    """
    _require_root()
    layout.check_name(name)
    check_size(nodes=nodes, slots=slots, etcd=etcd, coordinators=coordinators)
    for program in ("etcd", "runc", "criu", "nft", "ip"):
        programs.require(program)
    if store:
        from moorage.store.config import backend_of  # not at import: the command must start fast

        backend_of(store, store_settings)  # a location that is none is named before anything is made
    with layout.locked(name):
        cluster = _record(name, state, nodes, lease_seconds, use_rto_max, slots, default, etcd, coordinators)
        cluster.store = store
        for node, own in zip(cluster.nodes, gpus, strict=False):
            node.gpus = list(own)
        settings = store_settings or StoreSettings()
        endpoint = settings.endpoint.replace("{gateway}", cluster.gateway)
        cluster.store_settings = msgspec.structs.replace(settings, endpoint=endpoint)
        cluster.write()
        try:
            _start(cluster, environment or {}, progress, on_network)
            asyncio.run(ready.wait_ready(cluster, ready_seconds, progress))
            if default:
                _link(Path(DEV_CLIENT_FILE), cluster.folder / "client.toml")
        except BaseException as error:
            progress("taking down what was started")
            kept = _remove(cluster, _quiet, keep_logs=True)
            if isinstance(error, MoorageError) and kept:
                logs = f"the logs are kept in {kept}"
                raise type(error)(error.message, f"{error.hint}; {logs}" if error.hint else logs) from error
            raise
    return cluster


def check_size(*, nodes: int, slots: int, etcd: int, coordinators: int) -> None:
    """Raise `UsageError` for a cluster of a size that cannot be."""
    if not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"a dev cluster has 1 to {MOST_NODES} nodes, not {nodes}")
    if slots < 0:
        raise UsageError(f"--slots {slots} is too small", "the least is 0, for no limit")
    if not (1 <= etcd <= 7 and 1 <= coordinators <= 7):
        raise UsageError("a dev cluster has 1 to 7 etcd servers and coordinators")


def _record(
    name: str,
    state: Path | None,
    nodes: int,
    lease_seconds: int,
    use_rto_max: bool = True,
    slots: int = 0,
    default: bool = True,
    etcd: int = 1,
    coordinators: int = 1,
) -> Cluster:
    """Choose names, networks and ports, and write the state file."""
    folder = (state or layout.DEFAULT_FOLDER / name).absolute()
    with layout.locked(layout.MACHINE):
        if name in layout.names():
            raise Conflict(
                f"dev cluster {name} exists already", f"use it, or take it down: {layout.down_command(name)}"
            )
        if (folder / "cluster.json").exists():
            raise Conflict(f"{folder} belongs to a dev cluster already", "name another folder")
        if folder.exists() and any(folder.iterdir()):
            raise Conflict(f"{folder} is not empty", "name an empty or new folder: `dev down` removes it")
        RUN_FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports = network.free_ports(2 * etcd + coordinators + 1)
        members = list(zip(ports[:etcd], ports[etcd : 2 * etcd], strict=True))
        rest, metrics = ports[2 * etcd : -1], ports[-1]
        cluster = Cluster(
            name=name,
            state=str(folder),
            subnet=layout.free_subnet([*network.taken_networks(), *_recorded_networks()]),
            etcd_port=members[0][0],
            etcd_peer_port=members[0][1],
            coordinator_port=rest[0],
            more_etcd=members[1:],
            more_coordinators=rest[1:],
            lease_seconds=lease_seconds,
            use_rto_max=use_rto_max,
            slots=slots,
            metrics_port=metrics,
            default=default,
        )
        for _ in range(nodes):
            cluster.new_node()
        cluster.write()
        _link(RUN_FOLDER / name, folder)
    return cluster


def _recorded_networks() -> list[str]:
    """The networks of other clusters, also of those that have not made theirs yet."""
    networks = []
    for name in layout.names():
        with contextlib.suppress(MoorageError):
            networks.append(layout.find(name).subnet)
    return networks


def _link(link: Path, target: Path) -> None:
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.symlink_to(target)
    new.rename(link)


def _start(
    cluster: Cluster, environment: Mapping[str, str], progress: Progress, on_network: Callable[[Cluster], None]
) -> None:
    progress(f"cluster {cluster.name}: {len(cluster.nodes)} nodes on {cluster.subnet}, state in {cluster.state}")
    roles.write_files(cluster)
    with layout.locked(layout.MACHINE):
        network.create(cluster)
    on_network(cluster)
    _create_store(cluster)
    for node in cluster.nodes:
        network.create_node(cluster, node)
        roles.write_node_files(cluster, node)
    _start_supervisor(cluster, environment)
    progress("letting the cluster's processes into etcd, and nobody else")
    asyncio.run(roles.secure_etcd(cluster))


def _create_store(cluster: Cluster) -> None:
    from moorage.store import Store  # not at import: the command must start fast

    Store.open(roles.store(cluster), create=True, settings=cluster.store_settings)


def _start_supervisor(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Start the supervisor and wait until it takes orders."""
    path = cluster.folder / "log" / "supervisor.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    reading, writing = os.pipe()
    try:
        # It forks and the process that is waited for here ends at once: a caller that lives on has no child to reap.
        subprocess.run(
            [sys.executable, "-P", "-m", "moorage.dev.supervisor", cluster.state, str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=os.environ | dict(environment),
            cwd="/",
            pass_fds=(writing,),
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(descriptor)
        os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if pipe.read() != b"ready":  # ends too when the supervisor dies
            lines = path.read_text(errors="replace").splitlines()[-3:]
            raise MoorageError("the supervisor did not start: " + " | ".join(lines), f"see {path}")


def down(name: str = "dev", *, progress: Progress = _quiet) -> bool:
    """Take a cluster down and remove all of it; False if there was none. Works on one that is half up. Idempotent."""
    _require_root()
    layout.check_name(name)
    with layout.locked(name):
        folder = layout.folder_of(name)
        try:
            cluster = layout.read(folder)
        except NotFound:
            (RUN_FOLDER / name).unlink(missing_ok=True)
            return False
        _remove(cluster, progress, keep_logs=False)
    return True


def _remove(cluster: Cluster, progress: Progress, *, keep_logs: bool) -> Path | None:
    """Remove all of a cluster; returns where its logs were kept."""
    progress(f"stopping the processes of cluster {cluster.name}")
    with contextlib.suppress(Unavailable):
        control.down(cluster)
    _end_recorded(cluster)
    for node in cluster.nodes:
        progress(f"removing {node.name}")
        _remove_node(cluster, node)
    end_all(lambda: naming(cluster.folder))
    sweep.unmount_below(cluster.folder)
    with layout.locked(layout.MACHINE):
        last = set(layout.names()) <= {cluster.name}
        network.remove(cluster, last=last)
        cluster.control.unlink(missing_ok=True)
        _unlink_default(cluster)
        kept = _keep_logs(cluster) if keep_logs else None
        shutil.rmtree(cluster.folder)
        (RUN_FOLDER / cluster.name).unlink(missing_ok=True)
    progress(f"cluster {cluster.name} is gone")
    return kept


def _end_recorded(cluster: Cluster) -> None:
    """End what the supervisor wrote down, the supervisor first, for it would start the others again."""
    try:
        data = (cluster.folder / "processes.json").read_bytes()
        recorded = msgspec.json.decode(data, type=dict[str, Identity])
    except (FileNotFoundError, msgspec.DecodeError):
        recorded = {}
    if supervisor := recorded.pop("supervisor", None):
        end([supervisor])
    end(recorded.values())


def _unlink_default(cluster: Cluster) -> None:
    link = Path(DEV_CLIENT_FILE)
    if link.is_symlink() and link.readlink() == cluster.folder / "client.toml":
        others = [path for name in layout.names() if name != cluster.name for path in _client_file(name)]
        if others:
            _link(link, max(others, key=lambda path: path.stat().st_mtime))
        else:
            link.unlink()


def _client_file(name: str) -> list[Path]:
    """The settings for clients of a cluster, if it may be the one that is used without being named."""
    try:
        other = layout.find(name)
    except MoorageError:
        return []
    path = other.folder / "client.toml"
    return [path] if other.default and path.exists() else []


def _keep_logs(cluster: Cluster) -> Path | None:
    """Keep the logs of a start that failed, beside where the cluster's folder was."""
    logs = cluster.folder / "log"
    if not logs.exists():
        return None
    kept = cluster.folder.with_name(f"{cluster.folder.name}-failed-logs")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(logs, kept)
    return kept


def _remove_node(cluster: Cluster, node: Node) -> None:
    """Remove everything of a node: processes, pods, mounts, cgroups, namespaces, cable, folders. Idempotent."""
    folder = cluster.node_folder(node.name)
    end_all(lambda: sweep.processes_of(cluster, node))
    for namespace in network.pod_namespaces(cluster, node):
        network.remove_namespace(namespace)
    network.remove_node(cluster, node)
    sweep.unmount_below(folder)
    pod_user.sweep(bound_sources(cluster.name, node.name))
    sweep.remove_cgroups(sweep.cgroups_of(cluster, node))
    if folder.exists():
        shutil.rmtree(folder)
    # Captures that were not in the store yet; nobody else would ever free that memory.
    shutil.rmtree(memory_root(cluster.name, node.name), ignore_errors=True)
    path_of(cluster.name, node.name).unlink(missing_ok=True)


def destroy(name: str, node_name: str) -> None:
    """Lose a node for good: everything that runs on it is killed, its namespace and state folder are removed.

    Nothing is told to the coordinator: it has to notice. Raises `NotFound`, `Unavailable`.
    """
    _require_root()
    with layout.locked(name):
        cluster = layout.find(name)
        node = cluster.node(node_name)
        # Cut first: a host that is gone says no good-byes.
        network.cut(cluster, node, control_only=False)
        with contextlib.suppress(Unavailable):  # nobody would start it again either
            control.stop(cluster, node.name, sweep.KILL)
        _remove_node(cluster, node)
        cluster.nodes.remove(node)
        cluster.write()


def add(name: str, *, ready_seconds: float = READY_SECONDS, progress: Progress = _quiet) -> Node:
    """Add a node and wait until it is live. Raises `NotFound`, `Unavailable`, `MoorageError`."""
    _require_root()
    with layout.locked(name):
        cluster = layout.find(name)
        control.status(cluster)  # nothing is begun that could not be ended
        node = cluster.new_node()
        cluster.write()
        network.create_node(cluster, node)
        roles.write_node_files(cluster, node)
        asyncio.run(roles.secure_etcd(cluster))
        control.start(cluster, node.name)
        asyncio.run(ready.wait_ready(cluster, ready_seconds, progress))
    return node


def cut(name: str, node_name: str, *, control_only: bool = False) -> None:
    """Pull a node's cable, or (``control_only``) cut it off from etcd and the coordinator alone."""
    cluster = layout.find(name)
    network.cut(cluster, cluster.node(node_name), control_only=control_only)


def mend(name: str, node_name: str) -> None:
    """Undo `cut`."""
    cluster = layout.find(name)
    network.mend(cluster, cluster.node(node_name))
