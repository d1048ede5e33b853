"""Seconds of the steps of one piece of work."""

from __future__ import annotations

import time


class Clock:
    """Adds up in ``timings`` what each step took, from one `lap` to the next."""

    def __init__(self, timings: dict[str, float]) -> None:
        self._timings = timings
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The step ``name`` ends here."""
        now = time.monotonic()
        self._timings[name] = self._timings.get(name, 0.0) + now - self._last
        self._last = now
