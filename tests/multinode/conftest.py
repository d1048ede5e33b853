"""What takes long because it waits begins together, in threads, when the first of it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support import faults
from tests.support.faults_run import run_lane

Lanes = dict[str, Future[list[str]]]


@pytest.fixture(scope="session")
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    """The lanes of the kill matrix that the tests of this run ask for, under way side by side."""
    wanted = [
        item.callspec.params.get("lane")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    broken_off = threading.Event()
    with ThreadPoolExecutor(len(faults.LANES)) as pool:
        try:
            yield {
                name: pool.submit(run_lane, name, cases, broken_off)
                for name, cases in faults.LANES.items()
                if name in wanted
            }
        finally:
            broken_off.set()
