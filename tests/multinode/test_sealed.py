"""Connections between ranks outlive two minutes in which both of their ends stand frozen and sealed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support import sealed


@pytest.mark.root
@pytest.mark.early
def test_connections_are_alive_after_two_minutes_sealed() -> None:
    lines = sealed.run()
    for rank in (0, 1):
        times = [line.time_ns for line in lines if line.rank == rank]
        longest = max(after - before for before, after in pairwise(times)) / 1e9
        assert longest >= sealed.SEALED_SECONDS
        assert len({line.body for line in lines if line.rank == rank}) == 1
