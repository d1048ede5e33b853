"""The guard's decision: every case of it, and every order of events in a small world around it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from moorage.worker.guard.fence import Action, Deadline, Read, State, decide, freed, renew

TIMES = range(5)
READS = [None, *(Read(incarnation, asked) for incarnation in range(4) for asked in TIMES)]


@pytest.mark.parametrize("own", [1, 2])
def test_every_case(own: int) -> None:
    for state, now, until, since, lapsed, read in itertools.product(State, TIMES, TIMES, TIMES, [False, True], READS):
        actions = decide(state, now, Deadline(until, since, lapsed), read, own)
        promised = now < until
        given_up = read is not None and (read.incarnation == 0 or read.incarnation > own)
        confirmed = read is not None and read.incarnation == own and read.asked > since
        if state is State.GONE:
            assert actions == ()
        elif state is State.OPEN:
            assert actions == (() if promised and not lapsed else (Action.FENCE, Action.READ))
        elif given_up:
            assert actions == (Action.KILL,)
        elif promised and confirmed:
            assert actions == (Action.LIFT,)
        else:
            assert actions == (Action.READ,)


def test_a_promise_never_becomes_shorter_and_a_broken_one_begins_anew() -> None:
    promise = Deadline(until=10, since=2)
    assert renew(promise, 9, now=5) == promise
    assert renew(promise, 12, now=5) == Deadline(12, 2)
    assert renew(promise, 20, now=10) == Deadline(20, 10, lapsed=True)
    assert renew(renew(promise, 20, now=15), 25, now=17) == Deadline(25, 15, lapsed=True)
    assert freed(Deadline(25, 15, lapsed=True)) == Deadline(25, 15)


class World(NamedTuple):
    """A node whose worker may lose contact, etcd, and a coordinator that may move the pod elsewhere."""

    now: int = 0
    incarnation: int = 1  # in etcd; the pod's own is 1
    lease: int = 2  # what the worker may promise: etcd keeps its session until then
    sent: int = 0  # a promise on its way to the guard; 0: none
    state: State = State.OPEN
    deadline: Deadline = Deadline(2, 0)
    asked: int = -1  # when the question under way was sent; -1: none
    read: Read | None = None


END = 9
LEASE = 2


def steps(world: World) -> list[World]:
    """Everything that may happen next. Only time and messages are free; nobody is told to be reasonable."""
    following = []
    if world.now < END:
        following.append(world._replace(now=world.now + 1))
    # The worker reaches etcd, in time or long after its session was lost (then with a new one), and promises so much.
    following.append(world._replace(lease=world.now + LEASE, sent=world.now + LEASE))
    if world.sent:
        renewed = renew(world.deadline, world.sent, world.now)
        following.append(world._replace(deadline=renewed, sent=0))
    # The coordinator raises the incarnation only when no promise is left standing.
    if world.now >= world.lease and world.incarnation < 2:
        following.append(world._replace(incarnation=world.incarnation + 1))
    if world.asked >= 0:
        following.append(world._replace(asked=-1, read=Read(world.incarnation, world.asked)))
    for action in decide(world.state, world.now, world.deadline, world.read, 1):
        match action:
            case Action.FENCE:
                following.append(world._replace(state=State.FENCED, read=None))
            case Action.READ:
                if world.asked < 0 and world.state is State.FENCED:
                    following.append(world._replace(asked=world.now))
            case Action.LIFT:
                following.append(world._replace(state=State.OPEN, deadline=freed(world.deadline)))
            case Action.KILL:
                following.append(world._replace(state=State.GONE))
    return following


def test_no_order_of_events_lets_a_pod_run_that_was_given_up() -> None:
    seen = {World()}
    todo = [World()]
    lifted = killed = 0
    while todo:
        world = todo.pop()
        # A guard acts at once on what it has to do; from then on the pod does not run, whatever the state is called.
        due = decide(world.state, world.now, world.deadline, world.read, 1)
        runs = world.state is State.OPEN and Action.FENCE not in due
        assert not (runs and world.incarnation > 1), world
        for following in steps(world):
            lifted += world.state is State.FENCED and following.state is State.OPEN
            killed += following.state is State.GONE and world.state is not State.GONE
            if following not in seen:
                seen.add(following)
                todo.append(following)
    # The search is worth something only if it went everywhere.
    assert len(seen) > 10_000
    assert lifted
    assert killed
