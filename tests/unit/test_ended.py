"""Which jobs that are over are forgotten."""

from __future__ import annotations

import itertools

import pytest

from moorage.coordinator.ended import Ended, Limits, forgettable

DAY = 86400.0
NOW = 1000 * DAY


def ended(name: str, days_ago: float, *, resumable: bool = False) -> Ended:
    return Ended(name, NOW - days_ago * DAY, resumable)


def test_what_is_too_old_and_what_is_too_many_goes_oldest_first() -> None:
    jobs = [ended("c", 1), ended("a", 8), ended("b", 2), ended("d", 0.5)]
    assert forgettable(jobs, Limits(), NOW) == ["a"]
    assert forgettable(jobs, Limits(most=2), NOW) == ["a", "b"]
    assert forgettable(jobs, Limits(most=2, days=0.75), NOW) == ["a", "b", "c"]


def test_what_could_be_gone_on_with_stays_and_does_not_count() -> None:
    jobs = [ended("saved", 400, resumable=True), ended("a", 2), ended("b", 1)]
    assert forgettable(jobs, Limits(most=2), NOW) == []
    assert forgettable(jobs, Limits(most=1), NOW) == ["a"]
    assert forgettable(jobs, Limits(resumable_days=399), NOW) == ["saved"]


def test_without_limits_nothing_is_forgotten() -> None:
    assert forgettable([ended("a", 999), ended("b", 998)], Limits(0, 0, 0), NOW) == []


@pytest.mark.parametrize(("most", "days"), list(itertools.product((0, 1, 3, 9), (0.0, 1.0, 5.0))))
def test_what_is_kept_is_what_is_newest(most: int, days: float) -> None:
    """Whatever the limits: of two jobs of a kind the older is never the one that is kept."""
    jobs = [ended(f"j{age}", age, resumable=kind) for age in range(7) for kind in (False, True)]
    gone = set(forgettable(jobs, Limits(most, days, days), NOW))
    for older, newer in itertools.permutations(jobs, 2):
        if older.resumable == newer.resumable and older.ended < newer.ended and newer.job in gone:
            assert older.job in gone
    kept = [job for job in jobs if job.job not in gone and not job.resumable]
    assert not most or len(kept) <= most
