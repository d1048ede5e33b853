"""A small HTTP server in a thread of its own: ``/metrics``, ``/healthz``, ``/readyz``.

On a loopback address it speaks plain HTTP. On any other it speaks mutual TLS with the daemon's own certificate: who
asks needs one of the cluster's authority. Certificates that are replaced on disk are used from the next connection on.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from moorage.errors import Conflict, UsageError
from moorage.observe.notify import Pulse
from moorage.tls import TlsFiles, stamp

log = structlog.get_logger(__name__)

#: A loop that has not come round for so long counts as hung.
HUNG_SECONDS = 15.0
_PATIENCE_SECONDS = 10.0


class Endpoint:
    """The server. ``ready()`` gives the reason why this process does not serve now, or an empty string."""

    def __init__(
        self, address: str, tls: TlsFiles, *, registry: CollectorRegistry, pulse: Pulse, ready: Callable[[], str]
    ) -> None:
        self._address = address
        self._tls = tls
        self._registry = registry
        self._pulse = pulse
        self._ready = ready
        self._server: _Server | None = None
        self.port = 0

    def start(self) -> None:
        """Listen. Raises `UsageError`, `Conflict` (the port is taken)."""
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        try:
            number, plain = int(port), ipaddress.ip_address(host).is_loopback
        except ValueError:
            raise UsageError(f"metrics address {self._address!r} is not IP:PORT", "correct `metrics`") from None
        try:
            self._server = _Server((host, number), self._answer, None if plain else self._tls)
        except OSError as error:
            raise Conflict(f"cannot listen on {self._address}: {error.strerror}", "correct `metrics`") from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics are served", address=f"{host}:{self.port}", tls=not plain)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            encode, kind = choose_encoder(accept)
            return 200, kind, encode(self._registry)
        if path == "/healthz":
            age = self._pulse.age
            return _told("" if age < HUNG_SECONDS else f"the event loop has not come round for {age:.0f} s")
        if path == "/readyz":
            return _told(self._ready())
        return 404, "text/plain", b"/metrics, /healthz, /readyz\n"


def _told(trouble: str) -> tuple[int, str, bytes]:
    return (503 if trouble else 200), "text/plain; charset=utf-8", f"{trouble or 'ok'}\n".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], answer: Callable[[str, str], tuple[int, str, bytes]], tls: TlsFiles | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answer = answer
        self._tls = tls
        self._stamp: Any = None
        self._context: ssl.SSLContext | None = None
        super().__init__(address, _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the connection's own thread: a peer that is slow in the handshake keeps nobody waiting.
        request.settimeout(_PATIENCE_SECONDS)
        if self._tls is not None:
            request = self._fresh(self._tls).wrap_socket(request, server_side=True)
        try:
            super().finish_request(request, client_address)
        finally:
            with contextlib.suppress(OSError):
                request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request for metrics failed", peer=str(client_address[0]), exc_info=True)

    def _fresh(self, tls: TlsFiles) -> ssl.SSLContext:
        now = (tls.stamp(), stamp(tls.crl))
        if self._context is None or now != self._stamp:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(tls.cert, tls.key)
            context.load_verify_locations(tls.ca)
            if tls.crl.exists():
                context.load_verify_locations(str(tls.crl))
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            context.verify_mode = ssl.CERT_REQUIRED
            self._context, self._stamp = context, now
        return self._context


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "moorage"
    sys_version = ""

    def do_GET(self) -> None:
        code, kind, body = self.server.answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
