"""Connections between ranks outlive two minutes in which both of their ends stand frozen and sealed."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise

import pytest

from tests.support.judge import Line
from tests.support.sealed import SEALED_SECONDS


@pytest.mark.root
@pytest.mark.timeout(600)
def test_connections_are_alive_after_two_minutes_sealed(sealed: Future[list[Line]]) -> None:
    lines = sealed.result()
    for rank in (0, 1):
        times = [line.time_ns for line in lines if line.rank == rank]
        longest = max(after - before for before, after in pairwise(times)) / 1e9
        assert longest >= SEALED_SECONDS
        assert len({line.body for line in lines if line.rank == rank}) == 1
