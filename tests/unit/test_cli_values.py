"""Durations, sizes and pairs as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.cli.values import human_bytes, human_seconds, pairs, seconds, size
from moorage.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [("10m", 600), ("30s", 30), ("1h30m", 5400), ("500ms", 0.5), ("2", 2), ("1.5h", 5400), ("1d", 86400), (" 5S ", 5)],
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "10 m", "10x", "-5s", "1m30", "inf", "nan", "1e3"])
def test_what_is_no_duration_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--every"):
        seconds(text, "--every")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1048576", 1 << 20), ("64GiB", 64 << 30), ("500M", 500_000_000), ("1.5k", 1500), ("2 MiB", 2 << 20)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1 2"])
def test_what_is_no_size_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--shm-size"):
        size(text, "--shm-size")


@given(st.integers(0, 10**7))
def test_whole_seconds_are_read_back(value: int) -> None:
    assert seconds(f"{value}s") == seconds(str(value)) == value


@given(st.floats(0, 1e18))
def test_what_people_read_is_short(value: float) -> None:
    assert len(human_seconds(value % 1e9)) <= 10
    assert human_bytes(value).endswith(("B", "KiB", "MiB", "GiB", "TiB"))


def test_variables_are_given_or_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED", "on")
    monkeypatch.delenv("MISSING", raising=False)
    assert pairs(["A=1", "B=x=y", "C=", "PASSED"], "--env") == {"A": "1", "B": "x=y", "C": "", "PASSED": "on"}
    for wrong in ("=x", "MISSING"):
        with pytest.raises(UsageError, match="--env"):
            pairs([wrong], "--env")
