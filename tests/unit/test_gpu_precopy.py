"""What is copied ahead of a pause, and where copies go in it: the decisions."""

from __future__ import annotations

import pytest

from moorage.errors import NoCapacity
from moorage.worker.gpu.copies import Room, joined, place
from moorage.worker.gpu.device import CHUNK
from moorage.worker.gpu.precopy import Mode, again, cold, mode
from moorage.worker.gpu.reserve import MORE, share
from moorage.worker.gpu.wire import BlockName

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "room", "stops", "fresh", "expected"),
    [
        (130, 8, False, False, "before"),  # a copy of all would not fit: the pause would spill to slower places
        (130, 8, False, True, "before"),
        (32, 100, False, True, "beside"),  # it fits: the pause does not wait, but a first checkpoint begins at once
        (32, 100, False, False, "no"),  # heartbeats copy in the pause, in milliseconds
        (32, 100, True, False, "before"),  # a pod that stops stands still while it is written
        (1, 0, True, False, "no"),  # too little to look at
        (0, 0, False, True, "no"),
    ],
)
def test_when_memory_is_copied_ahead(total: int, room: int, stops: bool, fresh: bool, expected: Mode) -> None:
    assert mode(total * GIB, room * GIB, stops=stops, fresh=fresh) == expected


def test_rounds_go_on_as_long_as_they_pay() -> None:
    assert again(1 << 62, 130 * GIB, 8 * GIB)
    assert again(130 * GIB, 20 * GIB, 8 * GIB)
    assert not again(20 * GIB, 20 * GIB, 8 * GIB), "as much changes as is sent"
    assert not again(20 * GIB, 8 * GIB, 8 * GIB), "the rest has room in the pause"


def test_only_chunks_that_stand_still_are_sent() -> None:
    one, two = BlockName(1, 1), BlockName(1, 2)
    a, b, c, d = (bytes([number]) * 32 for number in range(4))
    found = cold({one: a + b + c, two: d}, {one: a + b + d}, lambda name: name == a)
    assert found.chunks == [(one, 1)], "one is known, one changed, one block is new"
    assert found.bytes == 3 * CHUNK


def test_copies_go_to_the_fastest_place_that_has_room() -> None:
    assert place(5, Room(9, 9, 9)) == Room(5, 0, 0)
    assert place(5, Room(2, 9, 9)) == Room(2, 3, 0)
    assert place(5, Room(-3, 1, 9)) == Room(0, 1, 4)
    with pytest.raises(
        NoCapacity, match=r"10 MiB of device memory changed.* 2 MiB on the device, 0 MiB in host.* 4 MiB"
    ):
        place(5, Room(1, -7, 2))


def test_neighbouring_chunks_are_one_piece() -> None:
    assert joined([]) == []
    assert joined([CHUNK, 2 * CHUNK, 9 * CHUNK]) == [(0, CHUNK, 2 * CHUNK), (2 * CHUNK, 9 * CHUNK, CHUNK)]


def test_the_drivers_room_is_what_it_saved_and_more() -> None:
    assert share(0, 1) == 0
    assert share(600 << 20, 1) == (600 << 20) + MORE
    assert share(2 * CHUNK, 2) == CHUNK + MORE
