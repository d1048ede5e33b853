"""Where pods go."""

from __future__ import annotations

import pytest

from moorage.coordinator.planner import Place, Wish, loads, place
from moorage.errors import NoCapacity, NotFound


def _nodes(*names: str, gpus: int = 0) -> list[Place]:
    return [Place(node=name, gpus=gpus) for name in names]


def test_pods_are_spread_over_the_nodes() -> None:
    assert place(Wish(pods=3), _nodes("c", "a", "b")) == ["a", "b", "c"]


def test_pods_share_nodes_when_there_are_too_few() -> None:
    assert place(Wish(pods=5), _nodes("a", "b")) == ["a", "b", "a", "b", "a"]


def test_the_least_loaded_nodes_come_first() -> None:
    places = [Place(node="a", pods=3), Place(node="b", pods=1), Place(node="c", pods=2)]
    assert place(Wish(pods=2), places) == ["b", "c"]


def test_named_nodes_are_taken_in_the_order_given() -> None:
    assert place(Wish(pods=2, on=["c", "a"]), _nodes("a", "b", "c")) == ["c", "a"]
    assert place(Wish(pods=2, on=["b"]), _nodes("a", "b", "c")) == ["b", "b"]


def test_a_pod_goes_back_to_its_node_when_nothing_else_decides() -> None:
    assert place(Wish(pods=2, prefer=["c", "b"]), _nodes("a", "b", "c")) == ["c", "b"]


def test_a_node_that_failed_is_avoided() -> None:
    assert place(Wish(pods=2, exclude=["a"]), _nodes("a", "b")) == ["b", "b"]
    with pytest.raises(NoCapacity, match="no node is left: nodes a, b failed"):
        place(Wish(pods=1, exclude=["a", "b"]), _nodes("a", "b"))


def test_a_node_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match="node x is not there"):
        place(Wish(pods=1, on=["x", "a"]), _nodes("a"))


def test_no_live_node_is_told() -> None:
    with pytest.raises(NoCapacity, match="no node is live"):
        place(Wish(pods=1), [])


def test_nodes_that_are_not_ready_are_told() -> None:
    with pytest.raises(NoCapacity, match="cannot run pods"):
        place(Wish(pods=1), [Place(node="a", ready=False)])


def test_the_nodes_of_the_spec_bind_what_is_asked_for_later() -> None:
    with pytest.raises(NoCapacity, match="may run on a only, not on b"):
        place(Wish(pods=1, on=["b"], allowed=["a"]), _nodes("a", "b"))
    assert place(Wish(pods=1, allowed=["b"]), _nodes("a", "b")) == ["b"]


def test_every_pod_gets_gpus_of_its_own() -> None:
    places = [Place(node="a", gpus=4, gpus_used=2), Place(node="b", gpus=4)]
    assert place(Wish(pods=3, gpus_per_pod=2), places) == ["a", "b", "b"]
    with pytest.raises(NoCapacity, match="4 pods with 2 GPUs each do not fit"):
        place(Wish(pods=4, gpus_per_pod=2), places)


def test_loads_count_every_job_but_the_one_that_is_placed() -> None:
    placements = {"j1": (["a", "b"], 1), "j2": (["a"], 2)}
    assert loads(placements) == {"a": (2, 3), "b": (1, 1)}
    assert loads(placements, without="j1") == {"a": (1, 2)}
