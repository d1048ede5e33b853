"""Where pods go."""

from __future__ import annotations

import pytest

from moorage.coordinator.planner import Place, Wish, place
from moorage.errors import Incompatible, NoCapacity, NotFound


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


def test_slots_cores_and_memory_are_given_away_once() -> None:
    places = [
        Place(node="a", slots=2, pods=1, cpus=4),
        Place(node="b", cpus=8, cpus_used=6, memory=100, memory_used=90),
    ]
    assert place(Wish(pods=2, cpus_per_pod=2), places) == ["b", "a"]
    assert place(Wish(pods=1, memory_per_pod=20), places) == ["a"]
    with pytest.raises(NoCapacity, match="a: every slot is taken; b: 0 cores free, 2 needed"):
        place(Wish(pods=3, cpus_per_pod=2), places)


def test_of_too_many_pods_it_is_told_how_many_there_is_room_for() -> None:
    told = r"5 pods do not fit on nodes a, b: 4 of them do, and then there is no room \(a: 0 cores free, 1 needed; b"
    with pytest.raises(NoCapacity, match=told):
        place(Wish(pods=5, cpus_per_pod=1), [Place(node="a", cpus=2), Place(node="b", cpus=2)])


def test_nothing_is_placed_on_a_cordoned_node_even_when_it_is_named() -> None:
    places = [Place(node="a", cordoned=True), Place(node="b")]
    assert place(Wish(pods=2, prefer=["a", "a"]), places) == ["b", "b"]
    with pytest.raises(NoCapacity, match="node a is cordoned"):
        place(Wish(pods=1, on=["a"]), places)


def test_planned_seats_are_taken_while_they_can_be_had() -> None:
    places = [Place(node="a", slots=2), Place(node="b"), Place(node="c", cordoned=True)]
    assert place(Wish(pods=3, seats=["a", "b", "a"]), places) == ["a", "b", "a"]
    assert place(Wish(pods=3, seats=["a", "a", "a"]), places) == ["a", "b", "a"]
    assert place(Wish(pods=2, seats=["a", "c"]), places) == ["a", "b"]


def test_no_pod_goes_where_its_checkpoint_does_not_fit() -> None:
    misfits = {(0, "a"): "kernel", (1, "a"): "kernel", (0, "b"): "driver"}
    assert place(Wish(pods=2, misfits=misfits), _nodes("a", "b", "c")) == ["c", "b"]
    assert place(Wish(pods=2, misfits=misfits, on=["b", "c"]), _nodes("a", "b", "c")) == ["c", "b"]
    with pytest.raises(Incompatible, match="does not fit node a: kernel"):
        place(Wish(pods=2, misfits=misfits, on=["a", "c"]), _nodes("a", "b", "c"))
    with pytest.raises(Incompatible, match=r"fits no node that is left \(a: kernel\)"):
        place(Wish(pods=2, misfits=misfits), _nodes("a"))
    with pytest.raises(Incompatible, match=r"pod 0 fits no node that is left \(b: driver\)"):
        place(Wish(pods=2, misfits=misfits), _nodes("a", "b"))


def test_room_is_told_apart_from_fit() -> None:
    misfits = {(0, "a"): "kernel"}
    places = [Place(node="a", gpus=1), Place(node="b", gpus=1, gpus_used=1)]
    # A node that fits and is full may become free: wait, rather than begin from nothing.
    with pytest.raises(NoCapacity, match="0 GPUs are free"):
        place(Wish(pods=1, gpus_per_pod=1, misfits=misfits), places)
    with pytest.raises(NoCapacity, match="0 GPUs are free"):
        place(Wish(pods=1, gpus_per_pod=1, misfits=misfits), [Place(node="b", gpus=1, gpus_used=1)])


def test_a_node_with_another_store_gets_no_pod() -> None:
    places = [Place(node="a", other_store=True), Place(node="b")]
    assert place(Wish(pods=2), places) == ["b", "b"]
    with pytest.raises(NoCapacity, match="node a opened another store than the coordinator") as caught:
        place(Wish(pods=1), places[:1])
    assert "shared folder or S3 bucket" in caught.value.hint
