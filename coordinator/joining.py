"""Letting machines in and out: join tokens, the certificates of new nodes, and what is taken back when one leaves.

Only a coordinator that has the authority's folder can do this (`CoordinatorConfig.authority`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from moorage import failpoints, trust
from moorage.barrier import access, cmp, op
from moorage.barrier.client import EtcdClient
from moorage.errors import Conflict, EnvironmentLacking, Forbidden, UsageError
from moorage.jointoken import JoinToken
from moorage.records import JoinRecord
from moorage.roles import Identity
from moorage.tls import TlsFiles
from moorage.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

failpoints.declare("coordinator.join.before", "coordinator.join.after")

DEFAULT_SECONDS = 900.0
LONGEST_SECONDS = 86400.0
_NODE_DAYS = 365.0
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,46}[a-z0-9])?")
#: A folder of the authority: etcd's own administrator, who may let users in.
ETCD_ADMIN = "etcd-root"


def check_node(name: str) -> str:
    """``name`` if a node may be called so. Raises `UsageError`."""
    if _NODE.fullmatch(name) and ".." not in name:
        return name
    raise UsageError(f"{name!r} is no name for a node", "use up to 48 lower-case letters, digits, dashes and dots")


def _authority(leader: Leader) -> Path:
    if not leader.config.authority:
        raise EnvironmentLacking(
            "this coordinator does not have the cluster's authority",
            "name its folder as `authority` in the coordinator's settings, or issue certificates with moorage certs",
        )
    return Path(leader.config.authority)


async def token(leader: Leader, request: pb.NodeTokenRequest) -> pb.NodeTokenReply:
    """A new token. Raises `UsageError`, `EnvironmentLacking`."""
    authority = _authority(leader)
    seconds = request.seconds or DEFAULT_SECONDS
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise UsageError(f"a token cannot be good for {seconds:g} s", "give 1 s to 24 h")
    node = check_node(request.node) if request.node else ""

    def make() -> JoinToken:
        key = trust.new_key()
        principal = f"join:{secrets.token_hex(6)}"
        certificate = trust.sign(authority, key.public_key(), principal, "join", seconds=seconds)
        ca = (authority / "ca.pem").read_bytes()
        return JoinToken(
            coordinators=leader.config.advertise.split(","),
            ca=ca,
            certificate=certificate,
            key=trust.key_pem(key),
            node=node,
        )

    made = await asyncio.to_thread(make)
    if node:
        # The name is kept here and not only in the token: whoever has it could change what it says.
        serial = trust.serial_of(made.certificate)
        await leader.etcd.put(leader.keys.joined(serial), msgspec.json.encode(JoinRecord(node=node)))
    return pb.NodeTokenReply(token=made.encode(), expires=time.time() + seconds)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise UsageError(f"{text!r} is no address", "give the machine's own IP address: --address") from error


def _public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(pem)
    except ValueError as error:
        raise UsageError("the machine sent no public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UsageError("the machine sent a key of another kind than P-256")
    return key


async def join(leader: Leader, request: pb.JoinRequest, caller: Identity) -> pb.JoinReply:
    """Let a machine in as a node. Asked again with the same token and key, the answer is the same.

    Raises `Conflict` for a token that was used or a name that is taken, `Forbidden`, `UsageError`.
    """
    authority = _authority(leader)
    node, address, key = check_node(request.node), _address(request.address), _public_key(request.public_key)
    fingerprint = hashlib.sha256(request.public_key).hexdigest()
    record_key = leader.keys.joined(f"{caller.serial:x}")
    async with leader.joining:
        held = await leader.etcd.get(record_key)
        record = msgspec.json.decode(held.value, type=JoinRecord) if held else JoinRecord(node=node)
        if record.node != node:
            raise Forbidden(f"this token is for node {record.node}, not for {node}", "ask for one for that name")
        if not record.public_key:
            await _name_is_free(leader, authority, node)
            principal = f"worker:{node}"
            certificate = await asyncio.to_thread(
                trust.sign, authority, key, principal, "worker", addresses=(address,), seconds=_NODE_DAYS * 86400
            )
            record = JoinRecord(node=node, public_key=fingerprint, certificate=certificate.decode())
            await failpoints.hit("coordinator.join.before")
            compare = [leader.leadership.compare(), cmp.mod_revision(record_key, held.mod_revision if held else 0)]
            done = await leader.etcd.txn(compare, [op.put(record_key, msgspec.json.encode(record))])
            await failpoints.hit("coordinator.join.after")
            if not done.succeeded:
                await asyncio.to_thread(trust.revoke, authority, trust.serial_of(certificate))
                raise Conflict("this join token is being used by another machine", "one token lets in one machine")
        elif record.public_key != fingerprint:
            raise Conflict(f"this join token was used for node {node} already", "make another: moorage node token")
    async with _etcd_admin(leader, authority) as etcd:
        if etcd is not None:
            await access.add_node(etcd, leader.keys, node)
    config = leader.config
    return pb.JoinReply(
        ca=(authority / "ca.pem").read_bytes(),
        crl=(authority / "crl.pem").read_bytes(),
        certificate=record.certificate.encode(),
        cluster=config.cluster,
        etcd_endpoints=config.etcd.endpoints,
        store=config.node_store or config.store,
        lease_seconds=config.lease_seconds,
        node=node,
        store_settings=msgspec.json.encode(config.store_settings).decode(),
    )


def _good(authority: Path, principal: str) -> frozenset[str]:
    """Serial numbers of a principal's certificates that neither were revoked nor have run out."""
    now = time.time()
    return frozenset(
        entry.serial
        for entry in trust.listing(authority)
        if entry.principal == principal and not entry.revoked and entry.expires > now
    )


async def _name_is_free(leader: Leader, authority: Path, node: str) -> None:
    if node in leader.nodes.live:
        raise Conflict(f"there is a live node {node} already", "give this machine another --name")
    good = await asyncio.to_thread(_good, authority, f"worker:{node}")
    for item in (await leader.etcd.list(leader.keys.joined(""))).items:
        record = msgspec.json.decode(item.value, type=JoinRecord)
        if record.node == node and record.certificate and trust.serial_of(record.certificate.encode()) in good:
            # It may only be down: whoever took its name would be two machines at once, or one that nobody let in as it.
            raise Conflict(
                f"another machine joined as {node}, and its certificate is good",
                f"give this machine another --name; if that one is gone: moorage node remove {node}",
            )
    for job in leader.jobs.values():
        if node in job.state.nodes:
            raise Conflict(f"job {job.state.name} was on a node {node}", "wait until it is restored elsewhere")


@contextlib.asynccontextmanager
async def _etcd_admin(leader: Leader, authority: Path) -> AsyncIterator[EtcdClient | None]:
    """etcd as its administrator; None where the authority holds none (an etcd without users)."""
    folder = authority / ETCD_ADMIN
    if not (folder / "cert.pem").exists():
        yield None
        return
    async with EtcdClient(leader.config.etcd.endpoints, tls=TlsFiles.in_folder(folder)) as etcd:
        yield etcd


async def remove(leader: Leader, node: str) -> pb.RemoveNodeReply:
    """Take back what a node was given: its certificates and its place in etcd. Raises `Conflict` while jobs are there.

    Its worker should have been stopped before; one that runs on is refused by everybody.
    """
    authority = _authority(leader)
    check_node(node)
    for job in leader.jobs.values():
        if node in [seat.node for seat in job.state.seats]:
            raise Conflict(f"job {job.state.name} runs on node {node}", f"move it away: moorage move {job.state.name}")
    try:
        revoked = await asyncio.to_thread(trust.revoke, authority, f"worker:{node}")
    finally:
        async with _etcd_admin(leader, authority) as etcd:
            if etcd is not None:
                await access.remove_node(etcd, node)
    await leader.crl.publish()
    return pb.RemoveNodeReply(serials=[entry.serial for entry in revoked])
