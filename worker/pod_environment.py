"""The environment of a rank: torchrun's variables and what keeps it capturable. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from moorage.errors import UsageError
from moorage.hooks import DEFAULT_ENVIRONMENT, DEFAULT_EVENTS, ENVIRONMENT_FILE, EVENTS_FILE
from moorage.v1.types_pb2 import JobSpec

DEFAULT_MASTER_PORT = 29500
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MACRO = re.compile(r"\$\{(\w+)\}")


class RankPlace(NamedTuple):
    """Where a rank stands in its job."""

    rank: int
    local_rank: int
    pod: int
    pods: int
    ranks_per_pod: int

    @property
    def world_size(self) -> int:
        return self.pods * self.ranks_per_pod


def place(spec: JobSpec, pod: int, local_rank: int) -> RankPlace:
    """The place of rank ``local_rank`` of ``pod``; ranks are numbered pod by pod, as torchrun does."""
    per_pod = max(1, spec.ranks_per_pod)
    return RankPlace(pod * per_pod + local_rank, local_rank, pod, max(1, spec.pods), per_pod)


def rank_environment(spec: JobSpec, job: str, pod: int, local_rank: int, pod0_address: str) -> dict[str, str]:
    """All variables of one rank.

    ``pod0_address`` is the job0 address of pod 0, where rank 0 of a job of several pods listens; a job of one pod
    uses the loopback, so that its connections survive a move to a node where every other address differs.

    Order of precedence, lowest first: what makes the pod capturable, the user's ``env``, the rank's place in the job,
    the user's ``rank_env``. Raises `UsageError` for an unknown macro in ``rank_env``.
    """
    where = place(spec, pod, local_rank)
    env = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **_capturable(where)}
    if spec.rendezvous and where.ranks_per_pod > 1:
        env["OMP_NUM_THREADS"] = "1"  # torchrun's default, so that ranks do not fight for the cores
    env.update(spec.env)
    env.update({"MOORAGE_JOB": job, "MOORAGE_JOB_NAME": spec.name, "MOORAGE_POD": str(pod)})
    env["MOORAGE_RANK"] = str(where.rank)
    env[EVENTS_FILE], env[ENVIRONMENT_FILE] = DEFAULT_EVENTS, DEFAULT_ENVIRONMENT
    if spec.rendezvous:
        env.update(_rendezvous(spec, job, where, pod0_address))
    env.update({name: _expand(name, value, where) for name, value in spec.rank_env.items()})
    return env


def rank_command(spec: JobSpec, local_rank: int) -> list[str]:
    """The argv of one rank. As with torchrun, ``${local_rank}`` in an argument is its number in the pod."""
    if not spec.rendezvous:
        return list(spec.command)
    return [part.replace("${local_rank}", str(local_rank)) for part in spec.command]


def _capturable(where: RankPlace) -> dict[str, str]:
    """Defaults that keep sockets on addresses that move with the pod, and NCCL free of what cannot be saved."""
    interface = "job0" if where.pods > 1 else "lo"
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        # Buffers of captured calls are registered by all members together: a rank whose partner has not captured the
        # same call yet, or has given its graph up, could not be rebuilt.
        "NCCL_GRAPH_REGISTER": "0",
    }


def _rendezvous(spec: JobSpec, job: str, where: RankPlace, pod0_address: str) -> dict[str, str]:
    return {
        "RANK": str(where.rank),
        "LOCAL_RANK": str(where.local_rank),
        "WORLD_SIZE": str(where.world_size),
        "LOCAL_WORLD_SIZE": str(where.ranks_per_pod),
        "GROUP_RANK": str(where.pod),
        "GROUP_WORLD_SIZE": str(where.pods),
        "ROLE_RANK": str(where.rank),
        "ROLE_WORLD_SIZE": str(where.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": pod0_address if where.pods > 1 else "127.0.0.1",
        "MASTER_PORT": str(spec.master_port or DEFAULT_MASTER_PORT),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # No elastic agent serves a store here: rank 0 opens it itself.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _expand(name: str, value: str, where: RankPlace) -> str:
    known: Mapping[str, int] = {
        "rank": where.rank,
        "local_rank": where.local_rank,
        "world_size": where.world_size,
        "local_world_size": where.ranks_per_pod,
        "group_rank": where.pod,
        "group_world_size": where.pods,
        "role_rank": where.rank,
        "role_world_size": where.world_size,
        "pod": where.pod,
        "pods": where.pods,
    }

    def replace(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UsageError(f"{name}: unknown macro ${{{match[1]}}}", f"known are {', '.join(sorted(known))}")
        return str(known[match[1]])

    return _MACRO.sub(replace, value)
