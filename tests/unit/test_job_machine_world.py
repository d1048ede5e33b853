"""Random histories of a job: orders, failures, lost nodes, and a coordinator that dies between any two writes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.job_world import World

_POLICIES: list[dict[str, Any]] = [
    {},
    {"checkpoint_every_seconds": 5.0},
    {"checkpoint_every_seconds": 5.0, "on_failure": "fail"},
    {"checkpoint_every_seconds": 1.0, "max_restarts": 2},
    {"checkpoint_every_seconds": 1.0, "cold_start": True},
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    choices=st.lists(st.integers(0, 2**16), min_size=60, max_size=600),
    pods=st.integers(1, 3),
    policy=st.sampled_from(_POLICIES),
)
def test_any_short_history_keeps_the_invariants_and_comes_to_rest(
    choices: list[int], pods: int, policy: dict[str, Any]
) -> None:
    stream = iter(choices)
    world = World(lambda n: next(stream, 0) % n, pods=pods, **policy)
    for _ in range(len(choices) // 3):
        world.step()
    world.settle()


@pytest.mark.parametrize("block", range(4))
def test_long_histories_keep_the_invariants_and_come_to_rest(block: int) -> None:
    committed = 0
    for seed in range(block * 50, block * 50 + 50):
        dice = random.Random(seed)
        world = World(dice.randrange, pods=dice.randint(1, 3), **dice.choice(_POLICIES))
        for _ in range(dice.choice([100, 500, 2000])):
            world.step()
        world.settle()
        committed += len(world.etcd.checkpoints)
    assert committed > 5, "the load was not real"
