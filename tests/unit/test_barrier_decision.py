"""The barrier's decision: every small case, and random larger ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.barrier.decision import Decision, decide, tally
from moorage.records import AttemptStart, Outcome, StopReason, Vote

ATTEMPT, INCARNATION = 7, 3
KINDS: tuple[StopReason, ...] = ("resume", "stop")


def begin(pods: int, kind: StopReason = "resume") -> AttemptStart:
    return AttemptStart(attempt=ATTEMPT, incarnation=INCARNATION, pods=pods, kind=kind, deadline_seconds=30)


def vote(pod: int, *, ok: bool = True, attempt: int = ATTEMPT, incarnation: int = INCARNATION) -> Vote:
    return Vote(pod=pod, incarnation=incarnation, attempt=attempt, ok=ok, reason="" if ok else "disk full")


def stale(pod: int) -> list[Vote]:
    """Votes that look like pod ``pod``'s and must not count."""
    return [
        vote(pod, incarnation=INCARNATION - 1),
        vote(pod, attempt=ATTEMPT - 1, ok=False),
        vote(pod + 1),  # filed under another pod
    ]


def small_cases(pods: int) -> Iterator[tuple[dict[int, Vote], Outcome | None, bool, frozenset[int]]]:
    options = [[None, vote(p), vote(p, ok=False), *stale(p)] for p in range(pods)]
    outcomes: list[Outcome | None] = [
        None,
        *(Outcome(kind=k, incarnation=INCARNATION, attempt=ATTEMPT) for k in ("resume", "stop", "abort")),
    ]
    losses = [frozenset(c) for n in range(pods + 1) for c in itertools.combinations(range(pods), n)]
    for cast in itertools.product(*options):
        votes = {pod: each for pod, each in enumerate(cast) if each is not None}
        for outcome, late, lost in itertools.product(outcomes, (False, True), losses):
            yield votes, outcome, late, lost


def judge(
    start: AttemptStart,
    votes: Mapping[int, Vote],
    outcome: Outcome | None,
    late: bool,
    lost: Set[int],
    decision: Decision,
) -> None:
    """The invariants of `decide`, said in another way than the code says them."""
    genuine = {p: v for p, v in votes.items() if v == vote(p, ok=v.ok) and v.pod == p and p in range(start.pods)}
    yes = {p for p, v in genuine.items() if v.ok}
    no = {p for p, v in genuine.items() if not v.ok}
    gone = set(lost) & set(range(start.pods))
    if outcome is not None:
        assert decision == Decision("stands", outcome.kind, outcome.reason)
        return
    complete = yes == set(range(start.pods)) and not gone
    assert (decision.action == "conclude" and decision.kind != "abort") == complete
    if complete:
        assert decision.kind == start.kind
    if decision.kind == "abort":
        assert no or gone or late
        assert decision.reason
    assert (decision.action == "wait") == (not complete and not no and not gone and not late)
    if decision.action == "wait":
        assert set(decision.missing) == set(range(start.pods)) - set(genuine)
        assert decision.missing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pods", [1, 2, 3])
def test_every_small_case_keeps_the_invariants(pods: int, kind: StopReason) -> None:
    start = begin(pods, kind)
    for votes, outcome, late, lost in small_cases(pods):
        judge(start, votes, outcome, late, lost, decide(start, votes, outcome=outcome, past_deadline=late, lost=lost))


@pytest.mark.parametrize("pods", [1, 2])
def test_stale_votes_change_nothing(pods: int) -> None:
    start = begin(pods)
    for votes, outcome, late, lost in small_cases(pods):
        before = decide(start, votes, outcome=outcome, past_deadline=late, lost=lost)
        for pod in set(range(pods + 1)) - set(votes):
            for extra in [*stale(pod), *([vote(pod)] if pod == pods else [])]:
                assert before == decide(start, {**votes, pod: extra}, outcome=outcome, past_deadline=late, lost=lost)


@pytest.mark.parametrize("pods", [1, 2])
def test_an_abort_for_cause_stays_and_time_stops_no_complete_attempt(pods: int) -> None:
    start = begin(pods)
    for votes, outcome, late, lost in small_cases(pods):
        before = decide(start, votes, outcome=outcome, past_deadline=late, lost=lost)
        if before.action != "conclude":
            continue
        if before.kind != "abort":
            assert decide(start, votes, outcome=outcome, past_deadline=True, lost=lost) == before
        elif not late:
            for pod, more in itertools.product(set(range(pods)) - set(votes), (True, False)):
                after = decide(start, {**votes, pod: vote(pod, ok=more)}, outcome=None, past_deadline=True, lost=lost)
                assert after.kind == "abort"


@given(
    pods=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    cast=st.dictionaries(
        st.integers(-1, 41),
        st.tuples(st.integers(-1, 41), st.booleans(), st.integers(6, 8), st.integers(2, 4)),
        max_size=45,
    ),
    honest=st.booleans(),
    late=st.booleans(),
    lost=st.frozensets(st.integers(-2, 42), max_size=3),
)
def test_random_cases_keep_the_invariants(
    pods: int,
    kind: StopReason,
    cast: dict[int, tuple[int, bool, int, int]],
    honest: bool,
    late: bool,
    lost: frozenset[int],
) -> None:
    start = begin(pods, kind)
    votes = {key: vote(pod, ok=ok, attempt=a, incarnation=i) for key, (pod, ok, a, i) in cast.items()}
    if honest:
        votes = {pod: vote(pod) for pod in range(pods)} | {k: v for k, v in votes.items() if k >= pods}
    judge(start, votes, None, late, lost, decide(start, votes, outcome=None, past_deadline=late, lost=lost))


def test_reasons_name_the_pods() -> None:
    start = begin(20)
    votes = {0: vote(0), 4: vote(4, ok=False)}
    assert tally(start, votes).reason == "pod 4: disk full"
    assert tally(start, {}, {1, 2}).reason == "pods 1, 2 lost"
    late = decide(start, {0: vote(0)}, outcome=None, past_deadline=True, lost=set())
    assert late.reason == "no answer from pods 1, 2, 3, 4, 5, 6, 7, 8 and 11 more within 30 s"
