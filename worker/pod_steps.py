"""Steps done side by side, and how long each one took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

Timings = dict[str, float]


async def timed(timings: Timings, name: str, work: Awaitable[T]) -> T:
    """Await ``work`` and write its seconds down, also when it fails."""
    began = time.monotonic()
    try:
        return await work
    finally:
        timings[name] = time.monotonic() - began


async def all_ended(*work: Awaitable[Any]) -> list[Any]:
    """Do all at once; raise the first error, but only when all have ended.

    Threads cannot be stopped: what a failed step leaves must not be cleared away while another still works on it.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
