"""The outside world: a ledger that books an amount for each call, over HTTP. It knows nothing of checkpoints.

``POST /book`` with an ``Idempotency-Key`` books once for each key, however often it is asked; without one it books
every time. ``GET /`` tells what was booked. Run it by itself: ``python ledger.py 8000``.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Ledger(ThreadingHTTPServer):
    """``calls``: the key of each call in order; ``booked``: amount by key."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.calls: list[str] = []
        self.booked: dict[str, int] = {}
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: Ledger

    def do_POST(self) -> None:
        amount = int(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            key = self.headers.get("Idempotency-Key") or f"call {len(self.server.calls)}"
            self.server.calls.append(key)
            booked = self.server.booked.setdefault(key, amount)
        self._answer({"key": key, "booked": booked})

    def do_GET(self) -> None:
        with self.server.lock:
            total = sum(self.server.booked.values())
            self._answer({"calls": len(self.server.calls), "bookings": len(self.server.booked), "total": total})

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    Ledger(("", int(sys.argv[1]))).serve_forever()
