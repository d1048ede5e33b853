"""The gate: what is counted and shown, what an order does, and what late, doubled and lost orders do not do."""

from __future__ import annotations

import itertools
import random

from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Creation, Handle, Lane, Order, Phase, Snapshot

LANE = Lane("c", 0, "collective")
SEND = Lane("c", 0, "send", 1)


class Rig:
    """A gate and what it has told its process."""

    def __init__(self) -> None:
        self.let_in: list[int] = []
        self.thaws = 0
        self.undrained: tuple[str, ...] = ()
        self.gate = Gate(3, self.let_in.append, self._thawed)
        self.round = 0

    def _thawed(self) -> None:
        self.thaws += 1

    def obey(self, phase: Phase, *admit: int, attempt: int = 1, round: int | None = None) -> Snapshot | None:
        if round is None:
            self.round += 1
        return self.gate.obey(Order(attempt, round or self.round, phase, admit), lambda: self.undrained)

    def report(self, phase: Phase, *admit: int, attempt: int = 1) -> Snapshot:
        report = self.obey(phase, *admit, attempt=attempt)
        assert report is not None
        return report

    def call(self, thread: int = 0) -> tuple[int, bool]:
        """A call that nothing interrupts: its ticket, and whether it went on."""
        ticket = self.gate.enter(thread, {LANE: 1})
        return ticket, self.gate.settle(ticket, self.gate.look())


def test_an_open_gate_counts_and_lets_pass() -> None:
    rig = Rig()
    first, passed = rig.call()
    assert passed
    rig.gate.leave(first)
    second, passed = rig.call(thread=7)
    assert passed
    report = rig.report("cut")
    assert report.admitted == {LANE: 2}
    assert [call.ticket for call in report.inside] == [second]
    assert report.users == {"c": 7}
    assert (report.rank, report.attempt, report.round, report.held) == (3, 1, 1, ())


def test_a_closed_gate_holds_and_counts_only_what_an_order_admits() -> None:
    rig = Rig()
    rig.obey("cut")
    tickets = [rig.call(thread)[0] for thread in range(3)]
    assert rig.gate.admitted == {}
    assert [call.ticket for call in rig.report("cut").held] == tickets
    report = rig.report("cut", tickets[1])
    assert rig.let_in == [tickets[1]]
    assert report.admitted == {LANE: 1}
    assert [call.ticket for call in report.inside] == [tickets[1]]
    assert [call.ticket for call in report.held] == [tickets[0], tickets[2]]
    rig.obey("open")
    assert rig.let_in == [tickets[1], tickets[0], tickets[2]]
    assert rig.gate.admitted == {LANE: 3}


def test_a_thread_that_looked_while_the_gate_was_open_is_seen_until_it_settles() -> None:
    rig = Rig()
    ticket = rig.gate.enter(0, {LANE: 1})
    was_open = rig.gate.look()
    report = rig.report("cut")
    assert (report.entering, report.admitted, report.held) == (1, {}, ())
    assert rig.gate.settle(ticket, was_open)
    report = rig.report("cut")
    assert (report.entering, report.admitted, len(report.inside)) == (0, {LANE: 1}, 1)


def test_a_thread_that_found_the_gate_closed_is_not_held_after_it_has_opened() -> None:
    rig = Rig()
    rig.obey("cut")
    ticket = rig.gate.enter(0, {LANE: 1})
    was_open = rig.gate.look()
    rig.obey("open")
    assert not was_open
    assert rig.gate.settle(ticket, was_open)
    assert rig.gate.held == {}


def test_a_group_is_one_call_with_all_its_lanes() -> None:
    rig = Rig()
    rig.obey("cut")
    ticket = rig.gate.enter(0, {LANE: 2, SEND: 1})
    assert not rig.gate.settle(ticket, rig.gate.look())
    assert rig.report("cut", ticket).admitted == {LANE: 2, SEND: 1}


def test_a_doubled_order_is_obeyed_once_and_answered_again() -> None:
    rig = Rig()
    rig.obey("cut")
    first, _ = rig.call()
    order = Order(1, 2, "cut", (first,))
    one = rig.gate.obey(order, tuple)
    rig.gate.leave(first)
    second, _ = rig.call()
    two = rig.gate.obey(order, tuple)
    assert one is not None and two is not None
    assert one.admitted == two.admitted == {LANE: 1}
    assert [call.ticket for call in two.held] == [second]
    assert rig.let_in == [first]


def test_late_orders_are_not_obeyed() -> None:
    rig = Rig()
    rig.obey("cut")
    ticket, _ = rig.call()
    rig.obey("drain")
    assert rig.obey("cut", ticket, round=1) is None
    assert rig.gate.phase == "drain"
    assert rig.let_in == []


def test_an_attempt_that_is_over_stays_over() -> None:
    rig = Rig()
    rig.obey("cut")
    rig.obey("open")
    assert rig.obey("cut", round=1) is None
    assert rig.call()[1]
    rig.obey("cut", attempt=2, round=1)
    phases: tuple[Phase, ...] = ("open", "cut", "drain")
    for phase, round in itertools.product(phases, range(1, 9)):
        assert rig.obey(phase, attempt=1, round=round) is None
    assert rig.gate.phase == "cut"


def test_any_mixture_of_late_doubled_and_lost_orders_is_like_the_newest_alone() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        rig = Rig()
        rig.obey("cut")
        tickets = [rig.call(thread)[0] for thread in range(6)]
        orders = [Order(1, n + 2, rng.choice(("cut", "drain")), (ticket,)) for n, ticket in enumerate(tickets)]
        arrivals = [order for order in orders for _ in range(rng.choice((0, 1, 1, 2)))]
        rng.shuffle(arrivals)
        newest = 0
        expected: list[int] = []
        for order in arrivals:
            if order.round > newest:
                newest = order.round
                expected += order.admit
            report = rig.gate.obey(order, tuple)
            assert (report is None) == (order.round < newest)
        assert rig.let_in == expected
        assert rig.gate.admitted.get(LANE, 0) == len(expected)


def test_streams_are_only_looked_at_for_a_drain_order() -> None:
    rig = Rig()
    rig.undrained = ("0x7f00",)
    assert rig.report("cut").undrained == ()
    assert rig.report("drain").undrained == ("0x7f00",)


def test_a_drain_order_holds_work_for_streams_until_the_next_order_after_it_was_admitted() -> None:
    rig = Rig()
    rig.obey("cut")
    assert rig.gate.submit(5) is None
    rig.obey("drain")
    ticket = rig.gate.submit(5)
    assert ticket is not None
    report = rig.report("drain")
    assert [(call.ticket, call.submits) for call in report.held] == [(ticket, True)]
    report = rig.report("drain", ticket)
    assert rig.let_in == [ticket]
    assert (report.entering, report.held) == (1, ())  # nobody may take this for a cut
    assert rig.gate.submit(5) is None
    assert rig.gate.submit(6) is not None
    assert rig.report("drain").entering == 0
    assert rig.gate.submit(5) is not None


CREATION = Creation("n", 1, 4)


def test_a_creation_stands_still_while_draining_unless_it_is_let_through() -> None:
    rig = Rig()
    ticket = rig.gate.enter(0, {}, (CREATION,))
    assert rig.gate.settle(ticket, rig.gate.look())
    assert not rig.gate.stands(ticket)
    report = rig.report("drain")
    assert rig.gate.stands(ticket)
    assert report.handles == (Handle("n", 1, 4, "creating"),)
    rig.report("drain", ticket)
    assert not rig.gate.stands(ticket)
    assert rig.thaws == 1
    # The next attempt does not know of that.
    rig.report("open")
    rig.report("cut", attempt=2)
    rig.report("drain", attempt=2)
    assert rig.gate.stands(ticket)
    rig.report("open", attempt=2)
    rig.gate.leave(ticket)
    assert rig.report("cut", attempt=3).handles == (Handle("n", 1, 4, "ready"),)


def test_a_creation_that_is_taken_back_has_never_entered() -> None:
    rig = Rig()
    ticket = rig.gate.enter(0, {}, (CREATION,))
    assert rig.gate.settle(ticket, rig.gate.look())
    rig.gate.take_back(ticket)
    report = rig.report("cut")
    assert (report.handles, report.inside, report.admitted) == ((), (), {})


def test_a_destroy_passes_every_gate_and_its_counts_stay() -> None:
    rig = Rig()
    ticket = rig.gate.enter(0, {}, (Creation("c", 0, 2),))
    assert rig.gate.settle(ticket, rig.gate.look())
    rig.gate.leave(ticket)
    rig.call()
    rig.obey("cut")
    ticket = rig.gate.enter(0, {}, destroys=True)
    assert rig.gate.settle(ticket, rig.gate.look())
    rig.gate.destroy("c", 0)
    report = rig.report("cut")
    assert report.handles == (Handle("c", 0, 2, "gone"),)
    assert report.admitted == {LANE: 1}


def test_moves_change_with_everything_that_threads_do() -> None:
    rig = Rig()
    seen = {rig.report("drain").moves}

    def moved() -> bool:
        new = rig.report("drain").moves not in seen
        seen.add(rig.gate.moves)
        return new

    ticket = rig.gate.enter(0, {LANE: 1})
    assert moved()
    rig.gate.settle(ticket, rig.gate.look())
    assert moved()
    assert not moved()
    rig.report("drain", ticket)
    assert moved()
    rig.gate.leave(ticket)
    assert moved()
    rig.gate.submit(1)
    assert moved()


def needing(rig: Rig, need: int, *, push: bool = False) -> Snapshot:
    rig.round += 1
    report = rig.gate.obey(Order(1, rig.round, "cut", needs={LANE: need}, push=push), tuple)
    assert report is not None
    return report


def test_calls_go_on_by_themselves_as_far_as_is_needed_and_no_further() -> None:
    rig = Rig()
    rig.obey("cut")
    first, passed = rig.call()
    assert not passed
    assert needing(rig, 3).admitted == {LANE: 1}
    assert rig.let_in == [first]
    assert rig.call()[1]
    assert rig.call()[1]
    last, passed = rig.call()
    assert not passed
    assert rig.gate.admitted == {LANE: 3}
    assert [call.ticket for call in needing(rig, 3).held] == [last]


def test_what_one_order_says_is_needed_ends_with_the_next() -> None:
    rig = Rig()
    rig.obey("cut")
    needing(rig, 3)
    rig.obey("cut")
    assert not rig.call()[1]


def test_a_group_goes_on_as_soon_as_one_of_its_lanes_is_needed() -> None:
    rig = Rig()
    needing(rig, 1)
    ticket = rig.gate.enter(0, {SEND: 2, LANE: 1})
    assert rig.gate.settle(ticket, rig.gate.look())
    assert not rig.call()[1]


def test_other_calls_of_the_thread_that_used_the_communicator_last_go_on_if_they_are_pushed() -> None:
    for push in (False, True):
        rig = Rig()
        rig.call(thread=5)
        rig.obey("cut")
        others = {thread: rig.gate.enter(thread, {Lane("d", 0, "collective"): 1}) for thread in (4, 5)}
        for ticket in others.values():
            assert not rig.gate.settle(ticket, rig.gate.look())
        needing(rig, 2, push=push)
        assert rig.let_in == ([others[5]] if push else [])
        needing(rig, 1, push=push)  # no longer behind
        assert len(rig.let_in) == push
