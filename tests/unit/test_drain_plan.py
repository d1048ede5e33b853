"""Where jobs go when nodes are drained: fixed cases, a large fleet, and properties of random ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.coordinator.capacity import Need, has
from moorage.coordinator.drain.model import JobView, NodeView, Plan
from moorage.coordinator.drain.plan import plan
from moorage.coordinator.drain.selector import driver_matches, parse
from moorage.errors import NotFound, UsageError


def node(
    name: str, *, slots: int = 0, gpus: int = 0, cpus: float = 8, memory: int = 1 << 34, **more: object
) -> NodeView:
    room = has(slots=slots, gpus=gpus, cpus=cpus, memory=memory)
    return NodeView(node=name, has=room, **more)  # type: ignore[arg-type]


def job(name: str, *seats: str, gpus: int = 0, allowed: tuple[str, ...] = (), **more: object) -> JobView:
    return JobView(job=name, name=name, seats=seats, need=Need(gpus=gpus), allowed=allowed, **more)  # type: ignore[arg-type]


def targets(found: Plan) -> dict[str, tuple[str, ...]]:
    return {move.job: move.target for move in found.moves}


def stuck(found: Plan) -> list[str]:
    return [one.job for one in found.stuck]


def test_only_the_pods_on_nodes_that_leave_get_another_seat() -> None:
    found = plan([node("a"), node("b"), node("c")], [job("j", "a", "b"), job("k", "b")], ["a"])
    assert targets(found) == {"j": ("c", "b")}


def test_waves_have_so_many_nodes_and_a_job_moves_in_its_first() -> None:
    fleet = [node(name) for name in "abcdef"]
    found = plan(fleet, [job("j", "c", "a"), job("k", "c"), job("l", "e")], ["a", "b", "c"], parallel=2)
    assert found.waves == (("a", "b"), ("c",))
    assert {move.job: move.wave for move in found.moves} == {"j": 1, "k": 2}
    assert not {"a", "b", "c"} & {seat for move in found.moves for seat in move.target}


@pytest.mark.parametrize("state", [{"cordoned": True}, {"live": False}, {"ready": False}])
def test_nothing_goes_to_a_node_that_is_not_in_service(state: dict[str, bool]) -> None:
    found = plan([node("a"), node("b", **state), node("c")], [job("j", "a")], ["a"])
    assert targets(found) == {"j": ("c",)}


def test_who_has_no_place_is_named_with_reason_and_choices() -> None:
    fleet = [node("a", slots=9), node("b", slots=1), node("c", slots=2, gpus=1)]
    jobs = [
        job("full", "b"),
        job("one", "a"),
        job("only-a", "a", allowed=("a",)),
        job("two", "a"),
        job("gpu", "a", gpus=2),
    ]
    found = plan(fleet, jobs, ["a"])
    assert stuck(found) == ["gpu", "only-a"] and set(targets(found)) == {"one", "two"}
    gpu, only = found.stuck
    assert "c: every slot is taken" in gpu.reason and "moorage park gpu" in " ".join(gpu.choices)
    assert "it may run on a only" in only.reason and "leave one of these nodes out" in only.choices[0]


def test_a_checkpoint_that_does_not_fit_a_node_does_not_go_there() -> None:
    old, new, third = node("a", driver="570.1"), node("b", driver="580.2"), node("c", driver="570.1")

    def fits(job: JobView, node: NodeView) -> str:
        return "" if node.driver == "570.1" else f"driver {node.driver} is not 570.1"

    assert targets(plan([old, new, third], [job("j", "a")], ["a"], fits=fits)) == {"j": ("c",)}
    [only] = plan([old, new], [job("j", "a")], ["a"], fits=fits).stuck
    assert "b: driver 580.2 is not 570.1" in only.reason


def test_who_can_go_to_few_nodes_chooses_before_who_can_go_anywhere() -> None:
    fleet = [node("a"), node("b", slots=1), node("c", slots=1)]
    found = plan(fleet, [job("any", "a"), job("picky", "a", allowed=("a", "b"))], ["a"])
    assert targets(found) == {"any": ("c",), "picky": ("b",)}


def test_a_job_that_was_placed_makes_room_when_it_can_go_elsewhere() -> None:
    fleet = [node("a"), node("b", slots=1), node("c", slots=1), node("d", slots=1)]
    # Each may go to two nodes; the first two greedily take b and c, which the third needs one of.
    jobs = [job("p", "a", allowed=("b", "c")), job("q", "a", allowed=("c", "d")), job("r", "a", allowed=("b", "c"))]
    found = plan(fleet, jobs, ["a"])
    assert not found.stuck and targets(found)["q"] == ("d",)


def test_gpus_are_kept_together() -> None:
    fleet = [node("a", gpus=8), node("b", gpus=8), node("c", gpus=4)]
    found = plan(fleet, [job("small", "a", gpus=2), job("big", "a", gpus=8)], ["a"])
    assert targets(found) == {"big": ("b",), "small": ("c",)}


def test_what_ends_by_itself_is_waited_for_and_what_cannot_be_moved_is_told() -> None:
    found = plan([node("a"), node("b")], [job("e", "a", ends=True), job("f", "a", fixed="it has no way")], ["a"])
    assert found.ending == ("e",) and found.moves == ()
    assert found.stuck[0].reason == "it has no way"


def test_what_was_promised_is_kept_as_long_as_it_can_be() -> None:
    fleet = [node(name, slots=1) for name in "abcd"]
    jobs = [job("j", "a")]
    assert targets(plan(fleet, jobs, ["a"], wanted={"j": ("d",)})) == {"j": ("d",)}
    assert targets(plan(fleet, [*jobs, job("k", "d")], ["a"], wanted={"j": ("d",)})) == {"j": ("b",)}


def test_nonsense_is_refused() -> None:
    with pytest.raises(NotFound, match="no node x"):
        plan([node("a")], [], ["x"])
    with pytest.raises(UsageError, match="no node is chosen"):
        plan([node("a")], [], [])
    with pytest.raises(UsageError, match="--parallel"):
        plan([node("a")], [], ["a"], parallel=0)


def test_500_nodes_and_2000_jobs_are_planned_without_a_misplaced_pod() -> None:
    fleet = [node(f"n{number:03}", slots=12, gpus=8) for number in range(500)]
    jobs = []
    for number in range(2000):
        pods = 1 + number % 3
        seats = [f"n{(number * 7 + pod * 31) % 500:03}" for pod in range(pods)]
        jobs.append(job(f"j{number:04}", *seats, gpus=number % 2))
    leaving = [f"n{number:03}" for number in range(0, 500, 4)]
    found = plan(fleet, jobs, leaving, parallel=10)
    check(fleet, jobs, leaving, found)
    assert not found.stuck and len(found.waves) == 13
    assert plan(fleet, jobs, leaving, parallel=10) == found, "the same fleet gives the same plan"


def check(fleet: list[NodeView], jobs: list[JobView], leaving: list[str], found: Plan) -> None:
    """What holds for every plan."""
    views = {view.node: view for view in fleet}
    concerned = {one.job for one in jobs if set(one.seats) & set(leaving) and not one.ends}
    moved = targets(found)
    assert set(moved) | set(stuck(found)) == concerned and not set(moved) & set(stuck(found))
    room = {view.node: view.has for view in fleet}
    full = {seat for one in jobs for seat in one.seats if not _spend(room, one.need, [seat])}
    room = {view.node: view.has for view in fleet}
    for one in jobs:
        seats = moved.get(one.job, one.seats)
        for before, after in zip(one.seats, seats, strict=True):
            if one.job in moved and before in leaving:
                view = views[after]
                assert after not in leaving and view.live and view.ready and not view.cordoned
                assert not one.allowed or after in one.allowed
            else:
                assert after == before
        assert _spend(room, one.need, [seat for seat in seats if seat not in full and seat not in leaving]), one


def _spend(room: dict[str, Need], need: Need, seats: list[str]) -> bool:
    """Take ``need`` for each seat; whether every one of them had it."""
    enough = True
    for seat in seats:
        enough = need.fits(room[seat]) and enough
        room[seat] -= need
    return enough


names = st.sampled_from("abcdefgh")
fleets = st.dictionaries(
    names, st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=2, max_size=8
).map(
    lambda found: [node(name, slots=slots, gpus=gpus, cordoned=closed) for name, (slots, gpus, closed) in found.items()]
)


@st.composite
def drains(draw: st.DrawFn) -> tuple[list[NodeView], list[JobView], list[str]]:
    fleet = draw(fleets)
    here = st.sampled_from([view.node for view in fleet])
    jobs = [
        job(
            f"j{number}",
            *draw(st.lists(here, min_size=1, max_size=3)),
            gpus=draw(st.integers(0, 2)),
            allowed=tuple(draw(st.sets(here, max_size=3))),
            ends=draw(st.integers(0, 9)) == 0,
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    return fleet, jobs, draw(st.lists(here, min_size=1, unique=True))


@given(drains(), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_no_plan_overfills_a_node_or_breaks_a_wish(
    case: tuple[list[NodeView], list[JobView], list[str]], parallel: int
) -> None:
    fleet, jobs, leaving = case
    found = plan(fleet, jobs, leaving, parallel=parallel)
    check(fleet, jobs, leaving, found)
    for one in found.stuck:
        assert one.reason and one.choices
    # Repeated after it was carried out, there is nothing left to do but what was stuck.
    after = [
        JobView(job=j.job, name=j.name, seats=targets(found).get(j.job, j.seats), need=j.need, allowed=j.allowed)
        for j in jobs
        if not j.ends
    ]
    assert not {move.job for move in plan(fleet, after, leaving, parallel=parallel).moves} & set(targets(found))


@given(st.integers(0, 6), st.integers(1, 3), st.integers(1, 3))
def test_of_equal_jobs_as_many_move_as_there_is_room(jobs: int, slots: int, others: int) -> None:
    fleet = [node("gone"), *(node(f"n{number}", slots=slots) for number in range(others))]
    found = plan(fleet, [job(f"j{number}", "gone") for number in range(jobs)], ["gone"])
    assert len(found.moves) == min(jobs, slots * others)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True), ("rack=7", True), ("rack==7", True), ("rack=8", False), ("rack!=8", True), ("other!=1", True),
        ("rack", True), ("!rack", False), ("!other", True), ("rack in (6, 7)", True), ("rack notin (6,7)", False),
        ("rack=7,zone in (a,b)", True), ("rack=7,zone=b", False), ("a/b=x", False),
    ],
)  # fmt: skip
def test_labels_are_selected_as_kubectl_does(text: str, matches: bool) -> None:
    assert parse(text)({"rack": "7", "zone": "a"}) is matches


@pytest.mark.parametrize("text", ["rack=7,", "=7", "rack in 7", "a b"])
def test_a_selector_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_a_driver_is_named_by_as_much_of_its_version_as_matters() -> None:
    assert driver_matches("570.86.15", "570") and driver_matches("570.86.15", "570.86.15")
    assert not driver_matches("570.86.15", "57") and not driver_matches("", "570")
