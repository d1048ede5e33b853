"""`moorage node`: machines come and go; and what the users of a node may ask its worker."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from moorage.cli import completing
from moorage.cli.options import Output, client, local_output_format, output_format
from moorage.cli.output import remark, when, write
from moorage.cli.values import pairs, seconds
from moorage.errors import UsageError

Folder = Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where settings and certificates lie.")]
Unit = Annotated[Path, typer.Option("--unit", metavar="FILE", help="The systemd unit.")]
_FOLDER, _UNIT = Path("/etc/moorage"), Path("/etc/systemd/system/moorage-worker.service")


def token(
    node: Annotated[str, typer.Option("--node", help="Only for a node of this name.")] = "",
    lifetime: Annotated[str, typer.Option("--lifetime", help="How long it is good, at most 24h.")] = "15m",
    output: Output = None,
) -> None:
    """Print a token with which one machine may join. Whoever has it may: hand it over like a password."""
    form = output_format(output)
    with client() as api:
        made = api.node_token(node=node, seconds=seconds(lifetime, "--lifetime"))
    if form == "table":
        print(made.token)
        remark(
            f"good until {when(made.expires)}, once: put it into a file, then `moorage node join --token FILE` there"
        )
    else:
        write({"token": made.token, "expires": made.expires}, form)


def join(
    token: Annotated[
        str, typer.Option("--token", metavar="FILE", envvar="MOORAGE_JOIN_TOKEN_FILE", help="Its file; - for stdin.")
    ],
    name: Annotated[str, typer.Option("--name", help="The node's name (the host's).")] = "",
    address: Annotated[str, typer.Option("--address", help="This machine's address for the others.")] = "",
    port: Annotated[int, typer.Option("--port", help="Where the worker listens.")] = 7400,
    folder: Folder = _FOLDER,
    state: Annotated[Path, typer.Option("--state", help="The worker's state folder.")] = Path("/var/lib/moorage"),
    label: Annotated[list[str] | None, typer.Option("--label", help="NAME=VALUE; may be repeated.")] = None,
    uplink: Annotated[str, typer.Option("--uplink", help="Interface towards the world (the default route's).")] = "",
    unit: Unit = _UNIT,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the worker.")] = True,
    output: Output = None,
) -> None:
    """Make this machine a node: certificates, settings and a systemd unit, by a token."""
    from moorage import jointoken, machine

    form = local_output_format(output)
    read = jointoken.read(token, sys.stdin.read() if token == "-" else "")
    plan = machine.Plan(
        node=name or read.node or machine.node_name(socket.gethostname()),
        address=address or machine.own_address(read.coordinators[0]),
        port=port,
        folder=folder.absolute(),
        state=str(state.absolute()),
        labels=pairs(label, "--label"),
        uplink=uplink,
        unit=unit.absolute(),
    )
    config = machine.join(read, plan)
    remark(f"this machine is node {config.node} of cluster {config.cluster}; its settings are in {plan.settings}")
    if start:
        remark(machine.start(plan))
        machine.wait_registered(config.node, config.cluster, 60.0)
    if form != "table":
        write({"node": config.node, "cluster": config.cluster, "settings": str(plan.settings), "started": start}, form)
    else:
        remark(
            f"node {config.node} is registered" if start else "start it: moorage worker --config " + str(plan.settings)
        )


def leave(folder: Folder = _FOLDER, unit: Unit = _UNIT) -> None:
    """Take this machine out of its cluster: stop the worker, revoke its certificate, remove what `join` wrote."""
    from moorage import machine

    for line in machine.leave(folder.absolute(), unit_path=unit.absolute()):
        remark(line)
    remark("this machine is no node any more")


def remove(
    node: Annotated[str, typer.Argument(metavar="NODE", autocompletion=completing.node_names)], output: Output = None
) -> None:
    """Revoke the certificates of a node that is gone for good, and its access to etcd."""
    form = output_format(output)
    with client() as api:
        serials = api.remove_node(node)
    if form == "table":
        remark(f"node {node}: {len(serials)} certificates revoked")
    else:
        write({"node": node, "serials": serials}, form)


def show(
    path: Annotated[Path | None, typer.Option("--socket", help="The worker's socket.")] = None,
    output: Output = None,
) -> None:
    """Your pods on this machine, asked of its worker over the local socket; no certificate is needed."""
    from moorage.localsocket import ask

    form = local_output_format(output)
    where = path or _only_socket()
    about = next(iter(ask(where, {"do": "node"})))
    rows = list(ask(where, {"do": "pods"}))
    remark(f"node {about['node']} of cluster {about['cluster']}; you are {about['you']}")
    columns = [(title, lambda row, key=title: str(row[key])) for title in ("name", "job", "pod", "phase", "owner")]
    write(rows, form, columns=columns, empty="no pods of yours")


def _only_socket() -> Path:
    from moorage.localsocket import FOLDER

    found = sorted(FOLDER.glob("*.sock")) if FOLDER.is_dir() else []
    if len(found) != 1:
        what = f"{len(found)} workers have a socket in {FOLDER}" if found else f"no worker has a socket in {FOLDER}"
        raise UsageError(what, "name one: --socket")
    return found[0]
