"""What takes long because it waits begins first and runs beside the other tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support import sealed as sealed_job
from tests.support.judge import Line


@pytest.fixture(scope="session", autouse=True)
def _sealed_from_the_start(request: pytest.FixtureRequest, nothing_is_left_behind: None) -> Iterator[None]:
    """Begins the two minutes of `sealed` before the first test of this folder, if a test of the run needs them."""
    wanted = [item for item in request.session.items if "sealed" in getattr(item, "fixturenames", ())]
    if any(not item.get_closest_marker("skip") for item in wanted):
        request.getfixturevalue("sealed")
    yield


@pytest.fixture(scope="session")
def sealed(nothing_is_left_behind: None) -> Iterator[Future[list[Line]]]:
    """The job of `tests.support.sealed`, under way."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(sealed_job.run)
