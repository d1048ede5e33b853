"""Waking whoever waits for a change, without losing one."""

from __future__ import annotations

import asyncio


class Bell:
    """``rung`` counts the rings; ``wait(since)`` returns when there were more than ``since``."""

    def __init__(self) -> None:
        self.rung = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake all who wait."""
        self.rung += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, since: int, timeout: float | None = None) -> bool:
        """Wait for a ring after the first ``since`` ones; False when ``timeout`` seconds passed without one."""
        try:
            async with asyncio.timeout(timeout):
                while self.rung <= since:
                    await self._event.wait()
        except TimeoutError:
            return False
        return True
