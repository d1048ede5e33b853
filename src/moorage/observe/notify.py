"""Word to the service manager, as sd_notify(3) has it, and the pulse of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from moorage.barrier import clock


def notify(message: str) -> None:
    """Tell the service manager, if there is one (``NOTIFY_SOCKET``)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.sendall(message.encode())


class Pulse:
    """Beats in the event loop, so that a loop that hangs is seen: by ``/healthz``, and by systemd's watchdog."""

    SECONDS = 1.0

    def __init__(self) -> None:
        self._last = clock.now()

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return clock.now() - self._last

    async def beat(self) -> None:
        """Beat until cancelled."""
        watched = "WATCHDOG_USEC" in os.environ
        while True:
            self._last = clock.now()
            if watched:
                notify("WATCHDOG=1")
            await asyncio.sleep(self.SECONDS)
