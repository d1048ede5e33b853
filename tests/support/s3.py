"""A real S3 server for tests (moto's, over HTTP), and a proxy before it that makes what goes wrong go wrong."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moorage.store_settings import StoreSettings

START_SECONDS = 30.0
ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTESTTEST", "a-secret-that-must-not-be-told"
_numbers = itertools.count(1)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class S3Server:
    """``with S3Server() as server: …``: a server with no bucket in it. Everything is gone afterwards."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-s3-"))
        self.credentials = self.folder / "credentials"
        self.write_credentials()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def write_credentials(self, *, token: str = "") -> None:
        """What `settings` names: a file as the AWS tools have it."""
        lines = ["[default]", f"aws_access_key_id = {ACCESS_KEY}", f"aws_secret_access_key = {SECRET_KEY}"]
        self.credentials.write_text("\n".join([*lines, f"aws_session_token = {token}" if token else "", ""]))
        self.credentials.chmod(0o600)

    def settings(self, endpoint: str = "", **others: Any) -> StoreSettings:
        """How a store reaches it; short patience, for tests that break it."""
        others = {"request_seconds": 2.0, "retry_seconds": 6.0} | others
        return StoreSettings(endpoint=endpoint or self.endpoint, credentials_file=str(self.credentials), **others)

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "moto.server", "-H", self.host, "-p", str(self.port)]
        if setpriv := shutil.which("setpriv"):  # a test run that is killed takes it with it
            command = [setpriv, "--pdeathsig", "KILL", *command]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
                cwd="/",
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._ask("GET", "/moto-api/data.json")
                return self
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__(None, None, None)
                    raise RuntimeError(f"the S3 server does not start: {error}") from error
                time.sleep(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        # It does not look at signatures, but at whether there is one.
        credential = f"Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=0"}
        request = urllib.request.Request(self.endpoint + path, method=method, data=body or None, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            return bytes(answer.read())

    def bucket(self) -> str:
        """Make a bucket; returns its name."""
        name = f"bucket-{next(_numbers)}"
        self._ask("PUT", f"/{name}")
        return name

    def names(self, bucket: str) -> list[str]:
        """All keys of a bucket, sorted (no more than a thousand)."""
        text = self._ask("GET", f"/{bucket}?list-type=2").decode()
        return sorted(part.partition("</Key>")[0] for part in text.split("<Key>")[1:])

    def read(self, bucket: str, name: str) -> bytes:
        return self._ask("GET", f"/{bucket}/{name}")

    def write(self, bucket: str, name: str, data: bytes) -> None:
        self._ask("PUT", f"/{bucket}/{name}", data)

    def remove(self, bucket: str) -> None:
        """Delete a bucket with all that is in it."""
        for name in self.names(bucket):
            self._ask("DELETE", f"/{bucket}/{name}")
        self._ask("DELETE", f"/{bucket}")


@dataclass
class Fault:
    """What happens to the next ``times`` requests that fit.

    ``kind``: 500, 503 (the server's answer), ``slow`` (answered after ``seconds``), ``hang`` (never answered),
    ``partial`` (half of the body comes), ``corrupt`` (one byte of the body is another), ``lost`` (done, but the answer
    is lost), ``expired`` (credentials), ``denied``, ``unconditional`` (conditions are not passed on).
    """

    kind: str
    method: str = ""
    path: str = ""
    times: int = 1_000_000
    seconds: float = 0.5
    met: int = field(default=0)

    def fits(self, method: str, path: str) -> bool:
        return self.met < self.times and self.method in ("", method) and self.path in path


_ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
}


class FaultProxy:
    """``with FaultProxy(server) as proxy: …``: `endpoint` leads to the server, through `faults`."""

    def __init__(self, server: S3Server, host: str = "127.0.0.1", port: int = 0) -> None:
        self.upstream = (server.host, server.port)
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle_one(self) -> None:
                with contextlib.suppress(OSError):
                    proxy._handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextlib.contextmanager
    def fault(self, kind: str, **options: Any) -> Iterator[Fault]:
        """A fault for the block."""
        fault = Fault(kind, **options)
        with self._lock:
            self.faults.append(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self.faults.remove(fault)

    def _pick(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.fits(method, path):
                    fault.met += 1
                    return fault
        return None

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        fault = self._pick(handler.command, handler.path)
        kind = fault.kind if fault else ""
        if fault and kind == "slow":
            self._over.wait(fault.seconds)
        if kind == "hang":
            self._over.wait(60)
            handler.close_connection = True
            return
        if kind in _ERRORS:
            status, code = _ERRORS[kind]
            data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
            self._answer(handler, status, {"Content-Type": "application/xml"}, data)
            return
        skip = {"host", "connection", "content-length"}
        if kind == "unconditional":
            skip |= {"if-none-match", "if-match"}
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in skip}
        upstream = http.client.HTTPConnection(*self.upstream, timeout=30)
        try:
            upstream.request(handler.command, handler.path, body, headers)
            found = upstream.getresponse()
            data = found.read()
        finally:
            upstream.close()
        if kind == "lost":
            handler.close_connection = True
            return
        told = {
            name: value for name, value in found.getheaders() if name.lower() not in ("connection", "server", "date")
        }
        if kind == "corrupt" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._answer(handler, found.status, told, data, half=kind == "partial")

    @staticmethod
    def _answer(
        handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, *, half: bool = False
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding"):
                handler.send_header(name, value)
        length = headers.get("Content-Length") if handler.command == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length or "0")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        handler.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            handler.close_connection = True
