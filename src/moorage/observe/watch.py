"""All that watches a daemon while it runs, as one task."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from moorage.observe.http import Endpoint
from moorage.observe.notify import Pulse
from moorage.tls import TlsFiles


class Watch:
    """The pulse, and the HTTP endpoint if there is an ``address`` for it. ``ready`` is that of `Endpoint`."""

    def __init__(self, address: str, tls: TlsFiles, registry: CollectorRegistry, ready: Callable[[], str]) -> None:
        self._pulse = Pulse()
        self._endpoint = Endpoint(address, tls, registry=registry, pulse=self._pulse, ready=ready) if address else None

    async def run(self) -> None:
        """Serve until cancelled. Raises `UsageError`, `Conflict` when the address cannot be had."""
        if self._endpoint is not None:
            self._endpoint.start()
        try:
            await self._pulse.beat()
        finally:
            if self._endpoint is not None:
                self._endpoint.close()
