from __future__ import annotations

import pytest

from moorage.errors import UsageError
from moorage.v1.types_pb2 import JobSpec
from moorage.worker.pod_environment import place, rank_environment


def spec(**values: object) -> JobSpec:
    return JobSpec(**{"name": "train", "pods": 2, "ranks_per_pod": 2, "rendezvous": True, **values})  # type: ignore[arg-type]


def test_ranks_are_numbered_pod_by_pod() -> None:
    assert [place(spec(pods=3), pod, local).rank for pod in range(3) for local in range(2)] == list(range(6))


def test_a_rank_of_the_second_pod_has_the_variables_of_torchrun() -> None:
    env = rank_environment(spec(), "j1", 1, 1, "100.96.0.1")
    assert env["RANK"] == env["ROLE_RANK"] == env["MOORAGE_RANK"] == "3"
    assert env["LOCAL_RANK"] == "1"
    assert env["WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "4"
    assert env["LOCAL_WORLD_SIZE"] == "2"
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("100.96.0.1", "29500")
    assert env["TORCHELASTIC_RUN_ID"] == env["MOORAGE_JOB"] == "j1"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == env["TP_SOCKET_IFNAME"] == "job0"
    assert env["MOORAGE_POD"] == "1"


def test_a_job_of_one_pod_stays_on_the_loopback() -> None:
    env = rank_environment(spec(pods=1), "j1", 0, 0, "100.96.0.1")
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_without_rendezvous_a_rank_gets_no_variables_of_torchrun() -> None:
    env = rank_environment(spec(rendezvous=False), "j1", 0, 0, "100.96.0.1")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"} & set(env)
    assert env["MOORAGE_RANK"] == "0"


def test_the_users_environment_wins_over_defaults_but_not_over_the_rank() -> None:
    user = {"OMP_NUM_THREADS": "4", "NCCL_SOCKET_IFNAME": "eth9", "RANK": "77", "PATH": "/opt/bin"}
    env = rank_environment(spec(env=user, master_port=1234), "j1", 0, 1, "100.96.0.1")
    assert (env["OMP_NUM_THREADS"], env["NCCL_SOCKET_IFNAME"], env["PATH"]) == ("4", "eth9", "/opt/bin")
    assert env["RANK"] == "1"
    assert env["MASTER_PORT"] == "1234"


def test_macros_of_rank_env_are_replaced() -> None:
    env = rank_environment(spec(rank_env={"OUT": "log-${rank}-of-${world_size}-${local_rank}"}), "j1", 1, 0, "a")
    assert env["OUT"] == "log-2-of-4-0"


def test_an_unknown_macro_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"OUT: unknown macro \$\{host\}"):
        rank_environment(spec(rank_env={"OUT": "${host}"}), "j1", 0, 0, "a")


def test_one_rank_in_a_pod_keeps_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in rank_environment(spec(ranks_per_pod=1), "j1", 0, 0, "a")
