"""The count that proves that no asynchronous I/O is in flight."""

from __future__ import annotations

import pytest

from moorage.worker import aio


@pytest.mark.parametrize(
    ("places", "processors", "fit"),
    [
        (127, 2, 120),  # lots of 15, of which 8 are 120
        (383, 2, 376),
        (2, 64, 1),
        (1023, 64, 1020),  # lots of 3
        (8065, 2, 8064),
    ],
)
def test_as_many_requests_fit_as_the_kernel_hands_out_places(places: int, processors: int, fit: int) -> None:
    assert aio.reachable(places, processors) == fit


def test_contexts_are_found_by_their_mappings() -> None:
    maps = (
        "7f0000000000-7f0000001000 rw-s 00000000 00:0f 3141                       /[aio] (deleted)\n"
        "7f0000002000-7f0000004000 r--p 00000000 fd:00 12                         /tmp/[aio]\n"
        "7f0000005000-7f0000007000 rw-s 00000000 00:0f 3142                       /[aio] (deleted)\n"
    )
    assert aio.addresses(maps) == [0x7F0000000000, 0x7F0000005000]


def test_events_that_wait_are_counted_round_the_ring() -> None:
    assert aio.Ring(0, 127, 5, 5).waiting == 0
    assert aio.Ring(0, 127, 120, 3).waiting == 10
