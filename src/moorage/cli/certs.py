"""`moorage certs`: a cluster's small private authority."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moorage.cli.options import DryRun, Output, local_output_format
from moorage.cli.output import remark, when, write
from moorage.cli.values import seconds
from moorage.errors import UsageError

Authority = Annotated[
    Path, typer.Option("--authority", metavar="FOLDER", envvar="MOORAGE_AUTHORITY", help="The authority's folder.")
]
Days = Annotated[float, typer.Option("--days", help="How long the certificate is good.")]
DEFAULT = Path("/etc/moorage/authority")

COLUMNS = [
    ("principal", lambda c: c["principal"]),
    ("role", lambda c: c["role"]),
    ("serial", lambda c: c["serial"]),
    ("expires", lambda c: when(c["expires"])),
    ("state", lambda c: c["state"]),
]


def create(
    authority: Authority = DEFAULT,
    name: Annotated[str, typer.Option("--name", help="The cluster's name, for the authority's certificate.")] = "",
    days: Days = 3650,
) -> None:
    """Make a new authority: a key that signs the certificates of one cluster."""
    from moorage import trust

    trust.create_authority(authority, f"moorage {name}".strip(), round(days))
    remark(f"authority made in {authority}; keep ca.key where only the coordinator and you can read it")


def issue(
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="user:NAME, worker:NODE, coordinator, etcd.")],
    into: Annotated[Path, typer.Option("--into", metavar="FOLDER", help="Where its files go.")],
    authority: Authority = DEFAULT,
    role: Annotated[
        str | None, typer.Option("--role", help="read, operate, operate-all, administer; else by the principal's kind.")
    ] = None,
    address: Annotated[
        list[str] | None, typer.Option("--address", help="An IP address or name of the server; may be repeated.")
    ] = None,
    lifetime: Annotated[str, typer.Option("--lifetime", help="How long it is good, such as 12h or 90d.")] = "365d",
    output: Output = None,
) -> None:
    """Issue a certificate: ca.pem, cert.pem, key.pem and crl.pem in a folder."""
    from moorage import roles, trust

    if role is not None and role in roles.ROLES and principal.startswith("user:") != (role in roles.PERSONS):
        raise UsageError(f"{principal} cannot have the role {role}", f"roles of users: {', '.join(roles.PERSONS)}")
    days = seconds(lifetime, "--lifetime") / 86400
    files = trust.issue(authority, into, principal, role=role, addresses=tuple(address or ()), days=days)
    form = local_output_format(output)
    if form != "table":
        write({"principal": principal, "ca": files.ca, "cert": files.cert, "key": files.key}, form)
    else:
        remark(f"certificate of {principal} in {into}")


def rotate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where a certificate and its key lie.")],
    authority: Authority = DEFAULT,
    days: Days = 365,
) -> None:
    """Replace a certificate and its key by new ones. Processes that use the folder take them up by themselves."""
    from moorage import trust

    trust.rotate(authority, folder, days=days)
    remark(f"new key and certificate in {folder}; the old one is good until it expires or is revoked")


def revoke(
    which: Annotated[str, typer.Argument(metavar="PRINCIPAL|SERIAL", help="Whose certificates, or which one.")],
    authority: Authority = DEFAULT,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Revoke certificates. Where the coordinator has the authority's folder, every server knows within seconds."""
    from moorage import trust

    if dry_run:
        doomed = [c for c in trust.listing(authority) if which in (c.serial, c.principal) and not c.revoked]
    else:
        doomed = trust.revoke(authority, which)
    write([_row(entry) for entry in doomed], local_output_format(output), columns=COLUMNS, empty="none")


def list_(authority: Authority = DEFAULT, output: Output = None) -> None:
    """List what was issued."""
    from moorage import trust

    rows = [_row(entry) for entry in trust.listing(authority)]
    write(rows, local_output_format(output), columns=COLUMNS, empty="nothing was issued")


def _row(entry: object) -> dict[str, object]:
    import msgspec

    row: dict[str, object] = msgspec.to_builtins(entry)
    gone = float(str(row["expires"])) < time.time()
    row["state"] = "revoked" if row["revoked"] else "expired" if gone else "good"
    return row
