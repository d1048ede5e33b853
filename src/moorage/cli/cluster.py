"""The cluster and this machine: nodes, doctor, the embedded cluster, the daemons, the runtime's programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moorage.cli import completing
from moorage.cli.options import DryRun, Output, client, local_output_format, output_format
from moorage.cli.output import bytes_text, progress, remark, write
from moorage.cli.values import seconds
from moorage.errors import Conflict, EnvironmentLacking, NotFound, UsageError

if TYPE_CHECKING:
    from moorage.coordinator.client import NodeInfo

Name = Annotated[str, typer.Option("--name", help="The cluster's name.")]
Config = Annotated[Path, typer.Option("--config", metavar="FILE", help="The daemon's settings (TOML).")]


def node_state(node: NodeInfo) -> str:
    """As kubectl words it: what a node is, and whether it takes pods."""
    state = ("ready" if node.ready else "not ready") if node.live else "lost"
    return f"{state}, cordoned" if node.cordoned else state


NODE_COLUMNS = [
    ("node", lambda n: n.node),
    ("state", node_state),
    ("address", lambda n: n.address),
    ("cpus", lambda n: str(n.cpus)),
    ("memory", lambda n: bytes_text(n.memory_bytes)),
    ("gpus", lambda n: str(len(n.gpus))),
    ("pods", lambda n: f"{n.pods} of {n.slots}" if n.slots else str(n.pods)),
    ("version", lambda n: n.version),
]


def nodes(output: Output = None) -> None:
    """List nodes."""
    form = output_format(output)
    with client() as api:
        write(api.nodes(), form, columns=NODE_COLUMNS, empty="no nodes")


def status(output: Output = None) -> None:
    """Which coordinator leads, and where the store is."""
    form = output_format(output)
    with client(patience=3.0) as api:
        write(api.status(), form)


def doctor(
    node: Annotated[str, typer.Option("--node", help="Ask this node (default: look at this machine).")] = "",
    job: Annotated[str, typer.Option("--job", help="What of this job cannot be saved now; exit code 204 if any.")] = "",
    output: Output = None,
) -> None:
    """What this machine or a node can and cannot do, and the way out; exit code 206 if something is missing."""
    if job:
        from moorage.cli.compat import examine

        return examine(job, output_format(output))
    # This machine is looked at whatever state the configured files are in: a fresh one has none.
    form = output_format(output) if node else local_output_format(output)
    if node:
        with client() as api:
            findings = [(f.name, f.state, f.detail, f.cure) for f in api.describe_node(node)]
    else:
        from moorage.runtime.doctor import findings as look

        with progress("looking at this machine"):
            findings = [(f.name, f.state, f.detail, f.cure) for f in look()]
    rows = [{"name": name, "state": state, "detail": detail, "cure": cure} for name, state, detail, cure in findings]
    columns = [(title, lambda row, key=title: row[key]) for title in ("name", "state", "detail", "cure")]
    write(rows, form, columns=columns)
    if missing := [row["name"] for row in rows if row["state"] == "missing"]:
        raise EnvironmentLacking(f"missing: {', '.join(missing)}", "the table says the way out")


def install() -> None:
    """Install CRIU, runc, etcd, nft and ip for moorage's own use (as root)."""
    from moorage.runtime.install import install as lay

    lay(progress=remark)


def up(
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes.")] = 3,
    name: Name = "dev",
    state: Annotated[Path | None, typer.Option(help="Folder of the cluster.")] = None,
    lease: Annotated[str, typer.Option(help="How long a node may be silent before it counts as lost.")] = "5s",
    slots: Annotated[int, typer.Option(help="Most pods on a node (0: no limit).")] = 0,
    etcd: Annotated[int, typer.Option("--etcd", help="How many etcd servers.")] = 1,
    coordinators: Annotated[int, typer.Option("--coordinators", help="How many coordinators; one leads.")] = 1,
    store: Annotated[str, typer.Option(help="Such as s3://bucket/prefix (default: a folder of its own).")] = "",
    store_endpoint: Annotated[str, typer.Option(help="URL of the S3 server, reachable from the nodes.")] = "",
    key_file: Annotated[str, typer.Option(help="Encrypt the store; see `moorage store new-key`.")] = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Start etcd, a coordinator and N workers on this machine, each worker in a namespace that stands for a host."""
    from moorage.config import ClientConfig, load
    from moorage.coordinator.client import Client
    from moorage.dev import cluster, layout
    from moorage.store_settings import StoreSettings

    form = local_output_format(output)
    length = _lease(lease)
    if dry_run:
        layout.check_name(name)
        cluster.check_size(nodes=nodes, slots=slots, etcd=etcd, coordinators=coordinators)
        if name in layout.names():
            raise Conflict(f"there is a cluster {name} already", layout.down_command(name))
        return write({"name": name, "nodes": nodes, "would": "start"}, form)
    with progress(f"cluster {name}") as update:
        made = cluster.up(
            nodes=nodes,
            name=name,
            state=state,
            lease_seconds=length,
            slots=slots,
            etcd=etcd,
            coordinators=coordinators,
            store=store,
            store_settings=StoreSettings(endpoint=store_endpoint, key_file=key_file and str(Path(key_file).absolute())),
            progress=lambda text: update(text, None),
        )
    summary = {
        "name": made.name,
        "state": made.state,
        "client_config": str(made.folder / "client.toml"),
        "nodes": [node.name for node in made.nodes],
    }
    write(summary, form)
    remark(f"ready; `moorage nodes` shows it, `{made.how_down}` removes it")
    with Client(config=load(made.folder / "client.toml", ClientConfig)) as api:
        if lacking := [node.node for node in api.nodes() if not node.ready]:
            remark(f"cannot run pods: {', '.join(lacking)}; `moorage doctor --node {lacking[0]}` says why")


def _lease(text: str) -> int:
    if (length := seconds(text, "--lease")) < 1:
        raise UsageError(f"--lease {text} is too short", "nodes must be heard of once in that time: 1s or more")
    return round(length)


def down(name: Name = "dev", dry_run: DryRun = False, output: Output = None) -> None:
    """Take a dev cluster down; nothing of it is left."""
    from moorage.dev import cluster, layout

    form = local_output_format(output)
    if dry_run:
        found = layout.find(name)
        plan = {"name": name, "nodes": [node.name for node in found.nodes], "state": found.state, "would": "remove"}
        return write(plan, form)
    with progress(f"cluster {name}") as update:
        there = cluster.down(name, progress=lambda text: update(text, None))
    remark(f"cluster {name} is gone" if there else f"there is no cluster {name}")
    if form != "table":
        write({"name": name, "removed": there}, form)


def destroy(
    node: Annotated[str, typer.Argument(metavar="NODE", autocompletion=completing.node_names)],
    name: Name = "dev",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Lose a node for good: all its processes are killed, its namespace and folder removed. Nobody is told."""
    from moorage.dev import cluster, layout

    form = local_output_format(output)
    if dry_run:
        if node not in [known.name for known in layout.find(name).nodes]:
            raise NotFound(f"cluster {name} has no node {node}", "see `moorage nodes`")
        return write({"name": name, "node": node, "would": "destroy"}, form)
    cluster.destroy(name, node)
    remark(f"node {node} is gone")
    if form != "table":
        write({"name": name, "node": node, "destroyed": True}, form)


def add(name: Name = "dev", output: Output = None) -> None:
    """Add a node to a dev cluster."""
    from moorage.dev import cluster

    form = local_output_format(output)
    with progress(f"cluster {name}") as update:
        node = cluster.add(name, progress=lambda text: update(text, None))
    print(node.name) if form == "table" else write({"name": name, "node": node.name}, form)


def coordinator(
    config: Config,
    accept_older_etcd: Annotated[
        bool, typer.Option("--accept-older-etcd", help="Give up what a restored etcd has forgotten; jobs are parked.")
    ] = False,
) -> None:
    """Run a coordinator (the daemon)."""
    from moorage.config import CoordinatorConfig, load
    from moorage.coordinator.daemon import run

    run(load(config, CoordinatorConfig), accept_older=accept_older_etcd)


def worker(config: Config) -> None:
    """Run a worker (the daemon)."""
    from moorage.config import WorkerConfig, load
    from moorage.worker.daemon import run

    run(load(config, WorkerConfig))
