"""The conversation: late, doubled, lost and missing reports; the deadline; what is over stays over; a transport."""

from __future__ import annotations

import asyncio
import random

import pytest

from moorage.errors import Unavailable
from moorage.nccl_quiesce import driver
from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Abort, Accept, Creation, Handle, Lane, Order, Plan, Snapshot
from moorage.nccl_quiesce.rounds import Outgoing, Pace, Rounds

PACE = Pace(shortest=0.001, longest=0.02, again=0.1)


def rounds(ranks: int = 2, *, deadline: float = 5.0, attempt: int = 1) -> Rounds:
    return Rounds(range(ranks), attempt=attempt, cut=Cut(Settings(deadline=deadline)), pace=PACE)


def answers(outgoing: Outgoing, **named: object) -> list[Snapshot]:
    """Reports of idle ranks to these orders."""
    return [Snapshot(order.attempt, order.round, rank, **named) for rank, order in outgoing]  # type: ignore[arg-type]


def feed(talk: Rounds, reports: list[Snapshot], now: float) -> Outgoing:
    outgoing: Outgoing = []
    for report in reports:
        outgoing += talk.receive(report, now)
    return outgoing


def orders(outgoing: Outgoing) -> list[tuple[int, int, str]]:
    return [(rank, order.round, order.phase) for rank, order in outgoing]


def test_idle_ranks_are_cut_in_two_rounds_and_stay_closed_until_released() -> None:
    talk = rounds()
    outgoing = talk.start(0.0)
    assert orders(outgoing) == [(0, 1, "cut"), (1, 1, "cut")]
    assert feed(talk, answers(outgoing), 0.001) == []
    outgoing = talk.tick(talk.wake)
    assert orders(outgoing) == [(0, 2, "drain"), (1, 2, "drain")]
    assert feed(talk, answers(outgoing), 0.003) == []
    assert talk.result == Accept(Plan())
    assert talk.tick(1000.0) == []
    assert not talk.released
    outgoing = talk.release(5.0)
    assert orders(outgoing) == [(0, 3, "open"), (1, 3, "open")]
    assert feed(talk, answers(outgoing), 5.1) == []
    assert talk.released


def test_a_round_is_decided_by_all_reports_to_its_own_order_and_by_nothing_else() -> None:
    talk = rounds(3)
    first = talk.start(0.0)
    early = answers(first)
    assert feed(talk, [early[0], early[0], early[1]], 0.0) == []  # doubled ones do not stand for the third
    assert talk.tick(0.05) == []
    feed(talk, [early[2]], 0.0)
    second = talk.tick(talk.wake)
    assert {order.round for _, order in second} == {2}
    assert feed(talk, early * 3, 0.1) == []  # late ones of the first round
    stranger = [Snapshot(1, 2, 9), Snapshot(2, 2, 0), Snapshot(1, 3, 0)]
    assert feed(talk, stranger, 0.1) == []
    assert talk.result is None
    feed(talk, answers(second), 0.1)
    assert isinstance(talk.result, Accept)


def test_the_first_report_of_a_round_counts() -> None:
    talk = rounds()
    (_, one), (_, two) = talk.start(0.0)
    lane = Lane("c", 0, "collective")
    busy = Snapshot(1, one.round, 0, admitted={lane: 1}, handles=(Handle("c", 0, 2),))
    talk.receive(busy, 0.0)
    talk.receive(Snapshot(1, one.round, 0), 0.0)
    outgoing = talk.receive(Snapshot(1, two.round, 1, handles=(Handle("c", 1, 2),)), 0.0)
    # Rank 1 is behind, and told so at once.
    assert outgoing == [
        (0, Order(1, 2, "cut")),
        (1, Order(1, 2, "cut", needs={Lane("c", 1, "collective"): 1}, push=True)),
    ]


def test_lost_messages_are_sent_again_to_those_who_are_silent() -> None:
    talk = rounds(3)
    outgoing = talk.start(0.0)
    feed(talk, answers(outgoing)[:1], 0.01)
    assert talk.tick(0.09) == []
    assert orders(talk.tick(0.1)) == [(1, 1, "cut"), (2, 1, "cut")]
    assert orders(talk.tick(0.2)) == [(1, 1, "cut"), (2, 1, "cut")]


def test_silent_ranks_are_named_at_the_deadline_and_told_to_open_for_ever() -> None:
    talk = rounds(3, deadline=1.0)
    outgoing = talk.start(0.0)
    feed(talk, answers(outgoing)[1:], 0.01)
    now, sent = 0.0, []
    while talk.result is None:
        now = talk.wake
        sent = talk.tick(now)
    assert now == pytest.approx(1.0)
    assert isinstance(talk.result, Abort)
    assert "rank 0" in talk.result.reason
    assert {order.phase for _, order in sent} == {"open"}
    feed(talk, answers(sent)[1:], now)
    assert not talk.released
    again = talk.tick(now + 50.0)
    assert orders(again) == [(0, 2, "open")]
    feed(talk, answers(again), now)
    assert talk.released
    assert talk.tick(now + 100.0) == []


def behind(outgoing: Outgoing) -> list[Snapshot]:
    """Rank 0 has issued a collective that rank 1 has not."""
    (_, order), _ = outgoing
    lane = Lane("c", 0, "collective")
    return [
        Snapshot(1, order.round, 0, admitted={lane: 3}, handles=(Handle("c", 0, 2),)),
        Snapshot(1, order.round, 1, handles=(Handle("c", 1, 2),)),
    ]


def test_an_attempt_that_cannot_end_names_rank_communicator_count_and_need() -> None:
    for in_flight in (False, True):
        talk = rounds(deadline=1.0)
        outgoing, now = talk.start(0.0), 0.0
        while talk.result is None:
            if outgoing and not (in_flight and now > 0.95):
                feed(talk, behind(outgoing), now)
            now = talk.wake
            outgoing = talk.tick(now)
        assert isinstance(talk.result, Abort)
        assert "rank 1 is behind on communicator c as member 1: 0 of 3 collectives" in talk.result.reason
        assert [(short.rank, short.count, short.need) for short in talk.result.behind] == [(1, 0, 3)]


def test_an_attempt_that_was_given_up_never_becomes_a_cut() -> None:
    talk = rounds()
    first = talk.start(0.0)
    feed(talk, answers(first), 0.0)
    drain = talk.tick(talk.wake)
    opened = talk.release(0.1)
    assert {order.phase for _, order in opened} == {"open"}
    assert feed(talk, answers(drain), 0.2) == []
    assert isinstance(talk.result, Abort)
    assert not talk.released
    feed(talk, answers(opened), 0.3)
    assert talk.released
    assert feed(talk, answers(drain) + answers(opened), 0.4) == []
    assert isinstance(talk.result, Abort)


class Ranks:
    """Gates behind a transport that loses, delays and doubles."""

    def __init__(self, ranks: int, seed: int, loss: float) -> None:
        self.random, self.loss = random.Random(seed), loss
        self.gates = [Gate(rank, lambda ticket: None) for rank in range(ranks)]
        self.orders = 0

    async def exchange(self, rank: int, order: Order) -> Snapshot | None:
        self.orders += 1
        await asyncio.sleep(self.random.random() * 0.002)
        if self.random.random() < self.loss:
            raise Unavailable(f"rank {rank} is away", hint="wait")
        report = self.gates[rank].obey(order, tuple)
        if self.random.random() < self.loss:
            await asyncio.sleep(60.0)  # obeyed, and the answer is lost
        return report


def test_a_transport_that_loses_much_comes_to_a_cut() -> None:
    async def attempt() -> None:
        ranks = Ranks(8, 5, 0.3)
        talk = Rounds(range(8), attempt=1, cut=Cut(Settings(deadline=60.0)), pace=Pace(again=0.02))
        assert isinstance(await driver.run(talk, ranks), Accept)
        assert {gate.phase for gate in ranks.gates} == {"drain"}
        await driver.release(talk, ranks)
        assert {gate.phase for gate in ranks.gates} == {"open"}

    asyncio.run(attempt())


def test_after_an_abort_the_driver_goes_on_until_all_gates_are_open() -> None:
    async def attempt() -> None:
        ranks = Ranks(4, 6, 0.3)
        for rank, gate in enumerate(ranks.gates):
            ticket = gate.enter(0, {}, (Creation("c", rank, 4),))
            gate.settle(ticket, gate.look())
            gate.leave(ticket)
        gate = ranks.gates[2]
        assert gate.settle(gate.enter(0, {Lane("c", 2, "collective"): 1}), gate.look())
        talk = Rounds(range(4), attempt=1, cut=Cut(Settings(deadline=0.3)), pace=Pace(again=0.02))
        result = await driver.run(talk, ranks)
        assert isinstance(result, Abort)
        assert {gate.phase for gate in ranks.gates} == {"open"}

    asyncio.run(attempt())
