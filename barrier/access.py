"""Who may read and write what in etcd. Users are the common names of client certificates, so no password exists.

etcd grants by prefix alone: a worker may write every attempt's votes, not only those of its own pods. What it cannot
do is write a job's state, its incarnation, who leads, or another node's registration.
"""

from __future__ import annotations

import contextlib
from typing import Any

from moorage.barrier import wire
from moorage.barrier.client import EtcdClient
from moorage.barrier.etcdpb import auth_pb2, rpc_pb2
from moorage.barrier.replies import AnswerLost
from moorage.errors import MoorageError, NotFound, Unavailable
from moorage.records import Keys

#: The user that may change users. Its certificate lies with the authority.
ADMIN = "root"
COORDINATOR_ROLE = "moorage-coordinator"
WORKER_ROLE = "moorage-worker"

_READ, _BOTH = auth_pb2.Permission.READ, auth_pb2.Permission.READWRITE


def node_role(node: str) -> str:
    """etcd's role for what one node alone may write."""
    return f"moorage-node-{node}"


async def _do(etcd: EtcdClient, method: str, request: Any) -> None:
    """One change of users or roles; what is so already is no error. Raises `Unavailable`, `Forbidden`."""
    for _ in range(3):
        try:
            await etcd.transport.call(f"Auth.{method}", request, timeout=etcd.timeout, idempotent=False)
            return
        except AnswerLost:
            continue  # each of them may be done again
        except MoorageError as error:
            if "already" in error.message or "is not granted" in error.message:
                return
            raise
    raise Unavailable(f"etcd at {etcd.transport.where} does not answer {method}")


async def _grant(etcd: EtcdClient, role: str, kind: Any, prefix: str) -> None:
    permission = auth_pb2.Permission(permType=kind, key=prefix.encode(), range_end=wire.range_end(prefix))
    await _do(etcd, "RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission))


async def _user(etcd: EtcdClient, name: str, *granted: str) -> None:
    options = auth_pb2.UserAddOptions(no_password=True)
    await _do(etcd, "UserAdd", rpc_pb2.AuthUserAddRequest(name=name, options=options))
    for role in granted:
        await _do(etcd, "UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role))


async def secure(etcd: EtcdClient, keys: Keys, nodes: list[str]) -> None:
    """Make the users and roles of a cluster and turn authentication on. Idempotent.

    ``etcd`` must come with the certificate of `ADMIN`. Raises `Unavailable`, `Forbidden`.
    """
    await _do(etcd, "RoleAdd", rpc_pb2.AuthRoleAddRequest(name="root"))
    await _user(etcd, ADMIN, "root")
    await _do(etcd, "RoleAdd", rpc_pb2.AuthRoleAddRequest(name=COORDINATOR_ROLE))
    await _grant(etcd, COORDINATOR_ROLE, _BOTH, keys.root)
    await _user(etcd, "coordinator", COORDINATOR_ROLE)
    await _do(etcd, "RoleAdd", rpc_pb2.AuthRoleAddRequest(name=WORKER_ROLE))
    for prefix in (keys.leader, keys.jobs, keys.root + "store/", keys.root + "trust/"):
        await _grant(etcd, WORKER_ROLE, _READ, prefix)
    await _grant(etcd, WORKER_ROLE, _BOTH, keys.all_attempts)
    for node in nodes:
        await add_node(etcd, keys, node)
    await _do(etcd, "AuthEnable", rpc_pb2.AuthEnableRequest())


async def add_node(etcd: EtcdClient, keys: Keys, node: str) -> None:
    """Let a node's worker in. Idempotent."""
    role = node_role(node)
    await _do(etcd, "RoleAdd", rpc_pb2.AuthRoleAddRequest(name=role))
    key = keys.node(node).encode()
    permission = auth_pb2.Permission(permType=_BOTH, key=key)
    await _do(etcd, "RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission))
    await _user(etcd, f"worker:{node}", WORKER_ROLE, role)


async def remove_node(etcd: EtcdClient, node: str) -> None:
    """Let it in no more. Idempotent."""
    for method, request in (
        ("UserDelete", rpc_pb2.AuthUserDeleteRequest(name=f"worker:{node}")),
        ("RoleDelete", rpc_pb2.AuthRoleDeleteRequest(role=node_role(node))),
    ):
        with contextlib.suppress(NotFound):
            try:
                await _do(etcd, method, request)
            except MoorageError as error:
                if "not found" not in error.message and "authentication is not enabled" not in error.message:
                    raise
