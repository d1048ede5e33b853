"""The messages of the NCCL proxy: what travels is what the cut takes."""

from __future__ import annotations

import pytest

from moorage.errors import CorruptData
from moorage.nccl_quiesce import wire
from moorage.nccl_quiesce.model import Call, Creation, Handle, Lane, Order


def _body(data: bytes) -> bytes:
    assert wire.length(data[: wire.HEADER_SIZE]) == len(data) - wire.HEADER_SIZE
    return data[wire.HEADER_SIZE :]


def test_an_order_travels() -> None:
    order = Order(3, 7, "drain", (4, 5), {Lane("id-1", 2, "send", 1): 9, Lane("id-1", 2, "collective"): 3}, True)
    message = wire.to_process(_body(wire.pack(wire.Obey.of(11, order))))
    assert message == wire.Obey(11, 3, 7, 2, [4, 5], [("id-1", 2, 1, 1, 9), ("id-1", 2, 0, -1, 3)], True)


def test_a_report_is_a_snapshot() -> None:
    held = wire.WireCall(8, 77, 0, [(1, 0, 2, 3, 1)], [])
    inside = wire.WireCall(7, 76, wire.DESTROYS, [], [(0, 1, 2)])
    report = wire.Report(
        1, False, 3, 7, ["a", "b"], [(0, 1, 0, -1, 5)], [held], [inside], 1, [(0, 1, 2, 1)], [(1, 77)], 42, ["stream 1"]
    )
    came = wire.from_process(_body(wire.pack(report)))
    assert isinstance(came, wire.Report)
    snapshot = came.snapshot(6, waits_for=(2,))
    assert snapshot is not None
    assert snapshot.admitted == {Lane("a", 1, "collective"): 5}
    assert snapshot.held == (Call(8, 77, {Lane("b", 0, "receive", 3): 1}),)
    assert snapshot.inside == (Call(7, 76, {}, (Creation("a", 1, 2),), destroys=True),)
    assert snapshot.handles == (Handle("a", 1, 2, "ready"),)
    assert (snapshot.rank, snapshot.users, snapshot.waits_for) == (6, {"b": 77}, (2,))
    assert (snapshot.moves, snapshot.undrained) == (42, ("stream 1",))


def test_what_is_none_of_ours_is_said() -> None:
    with pytest.raises(CorruptData):
        wire.length(b"\0" * wire.HEADER_SIZE)
    with pytest.raises(CorruptData):
        wire.from_process(b"\x91\x63")
    with pytest.raises(CorruptData):
        wire.Report(1, False, 1, 1, [], [(0, 0, 0, -1, 1)], [], [], 0, [], [], 0, []).snapshot(0)
