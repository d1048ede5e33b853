"""Which GPUs of a machine a worker gives to pods, and in which order."""

from __future__ import annotations

import pytest

from moorage.errors import UsageError
from moorage.worker.gpu_host import offered

KNOWN = ["GPU-a", "GPU-b", "GPU-c"]


def test_without_a_setting_all_are_given_in_bus_order() -> None:
    assert offered(KNOWN, []) == KNOWN
    assert offered([], []) == []


def test_the_setting_chooses_and_orders_by_number_and_by_uuid() -> None:
    assert offered(KNOWN, ["2", "GPU-a"]) == ["GPU-c", "GPU-a"]
    assert offered(KNOWN, ["1", "0"]) == ["GPU-b", "GPU-a"]


@pytest.mark.parametrize(
    ("wanted", "said"), [(["3"], "no GPU 3"), (["GPU-x"], "no GPU GPU-x"), (["0", "GPU-a"], "twice")]
)
def test_what_is_not_there_or_named_twice_is_refused(wanted: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        offered(KNOWN, wanted)
