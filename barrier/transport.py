"""Connections to etcd: several endpoints, TLS, tokens, and for every failed call whether it may have been executed.

A request is handed to a connection only when that connection stands. So a failure to connect is known to have had no
effect, with no guessing from error texts; any failure after that, unless etcd's answer says otherwise, leaves it open
whether the request was executed (`AnswerLost`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from grpc.aio import EOF  # type: ignore[attr-defined]

from moorage.barrier.etcdpb import POOL, rpc_pb2
from moorage.barrier.replies import AnswerLost, check_version, classify, refusal
from moorage.errors import Unavailable, UsageError
from moorage.trust import TlsFiles

log = structlog.get_logger(__name__)

_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # etcd closes connections of clients that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # what one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retries are decided here, where it is known what a request does.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # Clients of one process share neither connections nor their backoff.
    ("grpc.use_local_subchannel_pool", 1),
]

_SERVICES = ("KV", "Watch", "Lease", "Maintenance", "Auth")
_HASTE_SECONDS = 2.0  # an election among etcd's members takes one to two
_SUSPECT_SECONDS = 5.0  # how long an endpoint that failed is used only if no other one answers

# A member that has lost its leader answers so at once, and the call goes to another one.
_LEADER = ("hasleader", "true")

# Users or roles were changed while the request was under way: it was not executed, and may be sent again.
_OLD_REVISION = "revision of auth store is old"

Metadata: TypeAlias = tuple[tuple[str, str], ...]


def _target(endpoint: str, tls: bool) -> str:
    """``host:port`` of ``endpoint``, which may be an ``http://`` or ``https://`` address."""
    scheme, separator, rest = endpoint.rpartition("://")
    if separator and (scheme not in ("http", "https") or (scheme == "https") != tls):
        wanted = "https" if tls else "http"
        raise UsageError(f"etcd endpoint {endpoint!r} does not begin with {wanted}://", "set or unset etcd's tls files")
    host, _, port = rest.rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"etcd endpoint {endpoint!r} is not HOST:PORT")
    return f"{host}:{port}"


class Endpoint:
    """One etcd member's address and the connection to it."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.suspect_until = 0.0
        self.version = ""
        self.lock = asyncio.Lock()
        self.channel = (
            grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(target, options=_OPTIONS)
        )
        self._methods = {
            f"{service}.{name}": call
            for service in _SERVICES
            for name, call in vars(POOL.stub(f"etcdserverpb.{service}")(self.channel)).items()
        }

    def method(self, name: str) -> Any:
        """The callable of ``Service.Method``."""
        return self._methods[name]

    def ready(self) -> bool:
        """Whether the connection stands; if not, it is being tried."""
        return self.channel.get_state(try_to_connect=True) == grpc.ChannelConnectivity.READY


class Transport:
    """All endpoints of one etcd cluster. Opened on first use, inside the running event loop."""

    def __init__(self, endpoints: Sequence[str], tls: TlsFiles | None, user: str, password: str) -> None:
        if not endpoints:
            raise UsageError("no etcd endpoint given", "set etcd.endpoints in the configuration")
        self._targets = [_target(endpoint, tls is not None) for endpoint in endpoints]
        self._tls = tls
        self.user = user
        self._password = password
        self._token = ""
        self._token_lock = asyncio.Lock()
        self._endpoints: list[Endpoint] = []
        self._older: list[Endpoint] = []
        self._stamp: tuple[object, ...] = ()
        self._current: Endpoint | None = None
        self.calls: set[Any] = set()  # those that `close` has to end
        self.closed = False
        self.where = ",".join(self._targets)

    def _check_open(self) -> None:
        if self.closed:
            raise Unavailable(f"the client of etcd at {self.where} is closed")

    def _open(self) -> list[Endpoint]:
        self._check_open()
        stamp = self._tls.stamp() if self._tls else ()
        if not self._endpoints or stamp != self._stamp:
            # Certificates that were replaced are for the connections from now on. What runs on an older connection
            # goes on there until that breaks.
            self._older += self._endpoints
            self._stamp = stamp
            credentials = None
            if self._tls:
                try:
                    ca, cert, key = self._tls.read()
                except OSError as error:
                    raise UsageError(f"etcd's TLS file {error.filename}: {error.strerror}") from error
                credentials = grpc.ssl_channel_credentials(ca, key, cert)
            self._endpoints = [Endpoint(target, credentials) for target in self._targets]
            random.shuffle(self._endpoints)  # clients spread over the members
        return self._endpoints

    async def close(self) -> None:
        """Close all connections. Calls in flight fail."""
        self.closed = True
        for call in list(self.calls):
            call.cancel()
        endpoints = [*self._endpoints, *self._older]
        await asyncio.gather(*(endpoint.channel.close(None) for endpoint in endpoints), return_exceptions=True)

    async def connected(self, deadline: float) -> Endpoint:
        """An endpoint whose connection stands: one that did not fail lately, or the one whose failure is oldest.

        ``deadline`` is in the event loop's time. All endpoints are tried at once, so that one which swallows packets
        costs nothing. Raises `Unavailable` at the deadline, `EnvironmentLacking` for a dangerous release.
        """
        loop = asyncio.get_running_loop()
        endpoints = self._open()
        patience = loop.time() + min(0.5, (deadline - loop.time()) / 4)
        pause = 0.002
        while True:
            self._check_open()
            ready = [endpoint for endpoint in endpoints if endpoint.ready()]
            now = loop.time()
            good = [endpoint for endpoint in ready if endpoint.suspect_until <= now]
            if not good and (now >= patience or all(endpoint.suspect_until > now for endpoint in endpoints)):
                good = sorted(ready, key=lambda endpoint: endpoint.suspect_until)
            if good:
                if await self._known_version(good[0], deadline):
                    self._current = good[0]
                    if good[0].suspect_until <= now:
                        good[0].suspect_until = 0.0
                    return good[0]
                continue
            if now >= deadline:
                raise Unavailable(f"etcd at {self.where} cannot be reached", await self._explain())
            # Asking is better than gRPC's wait for a change, which cannot be given up: it would outlive the channel.
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    async def _known_version(self, endpoint: Endpoint, deadline: float) -> bool:
        """Whether ``endpoint`` may be used: its version is read once, before its first use."""
        async with endpoint.lock:
            if endpoint.version:
                return True
            left = max(0.1, deadline - asyncio.get_running_loop().time())
            try:
                metadata = await self.metadata(endpoint, deadline)
                left = left if len(self._endpoints) == 1 else min(left, 2.0)
                request = rpc_pb2.StatusRequest()
                with self.calling(endpoint, "Maintenance.Status", request, timeout=left, metadata=metadata) as call:
                    status = await call
            except grpc.aio.AioRpcError as error:
                meaning = classify(error.code(), error.details() or "")
                if meaning == "refused" or (meaning == "token" and not self.user):
                    endpoint.version = "unknown"  # the status is not shown to this user
                    return True
                if meaning == "token":
                    self._token = ""
                self.suspect(endpoint)
                if asyncio.get_running_loop().time() >= deadline:
                    raise Unavailable(f"etcd at {self.where} does not answer", error.details() or "") from error
                await asyncio.sleep(0.05)
                return False
            check_version(status.version, endpoint.target)
            endpoint.version = status.version or "unknown"
            return True

    async def _explain(self) -> str:
        """Why no endpoint can be reached, for the hint."""
        host, _, port = self._endpoints[0].target.rpartition(":")
        try:
            async with asyncio.timeout(0.5):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except TimeoutError:
            return f"{host}:{port} does not answer to TCP: check addresses and firewalls"
        except OSError as error:
            return f"is it running? {host}:{port}: {error.strerror or error}"
        if self._tls:
            return f"{host}:{port} accepts TCP but not this TLS: check the files and the names in its certificate"
        return f"{host}:{port} accepts TCP but does not speak plain gRPC: does it want TLS?"

    def calling(self, endpoint: Endpoint, method: str, request: Any, **how: Any) -> _Calling:
        """Start a call, which ends with the block or with `close`. Raises `Unavailable` once this client is closed.

        Give a stream its requests as an iterator: gRPC hangs in a ``write`` whose call is cancelled.
        """
        self._check_open()  # gRPC lets a call on a closed channel hang
        return _Calling(self, endpoint.method(method)(request, **how))

    def current(self) -> Endpoint | None:
        """The endpoint last used, if its connection stands and nothing speaks against it."""
        endpoint = self._current
        if endpoint is None or endpoint.suspect_until or self.closed or not endpoint.ready():
            return None
        return endpoint

    def suspect(self, endpoint: Endpoint) -> None:
        """Prefer other endpoints for a while."""
        endpoint.suspect_until = asyncio.get_running_loop().time() + _SUSPECT_SECONDS

    def _metadata(self) -> Metadata:
        return (_LEADER, ("token", self._token)) if self._token else (_LEADER,)

    async def metadata(self, endpoint: Endpoint, deadline: float) -> Metadata:
        """Metadata of a call, with a token if this client has a user. Raises `Forbidden`, `grpc.aio.AioRpcError`."""
        if not self.user or self._token:
            return self._metadata()
        async with self._token_lock:
            if not self._token:
                left = max(0.1, min(2.0, deadline - asyncio.get_running_loop().time()))
                request = rpc_pb2.AuthenticateRequest(name=self.user, password=self._password)
                try:
                    with self.calling(endpoint, "Auth.Authenticate", request, timeout=left) as call:
                        reply = await call
                except grpc.aio.AioRpcError as error:
                    details = error.details() or ""
                    if "authentication is not enabled" in details:
                        return self._metadata()
                    if classify(error.code(), details) == "refused":
                        raise refusal(error.code(), details, endpoint.target, self.user) from error
                    raise
                self._token = reply.token
            return self._metadata()

    def forget_token(self, metadata: Metadata) -> None:
        """The token that ``metadata`` carried is no longer good."""
        if dict(metadata).get("token", "") == self._token:
            self._token = ""

    async def call(
        self,
        method: str,
        request: Any,
        *,
        timeout: float,
        idempotent: bool,
        hasty: bool = False,
        stream: bool = False,
    ) -> Any:
        """Make one request and return its answer, within ``timeout`` seconds.

        Sent again while it surely was not executed, and with ``idempotent`` also when that is open. Otherwise
        `AnswerLost`. ``hasty``: do not wait all of the time for one answer, the caller knows what to do without it.
        ``stream``: the method streams both ways and answers each message with one.
        Raises `Unavailable` (surely not executed, unless idempotent) or what `refusal` makes of etcd's answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        pause, tokens = 0.02, 0
        while True:
            endpoint = self.current() or await self.connected(deadline)
            left = max(0.05, deadline - loop.time())
            if hasty or (idempotent and len(self._endpoints) > 1):
                left = max(min(left / 2, _HASTE_SECONDS), min(left, 0.5))  # leave time for another try
            sent = False
            metadata: Metadata = ()
            try:
                metadata = await self.metadata(endpoint, deadline)
                sent = True
                argument = [request] if stream else request
                with self.calling(endpoint, method, argument, timeout=left, metadata=metadata) as call:
                    return await (_exchange(call) if stream else call)
            except grpc.aio.AioRpcError as error:
                details = error.details() or error.code().name
                meaning = classify(error.code(), details)
                if meaning == "token" and (self.user or _OLD_REVISION in details) and tokens < 3:
                    tokens += 1
                    self.forget_token(metadata)
                    continue
                if meaning in ("refused", "token"):
                    raise refusal(error.code(), details, endpoint.target, self.user) from error
                self.suspect(endpoint)
                if sent and meaning == "unknown" and not idempotent:
                    raise AnswerLost(details) from error
                if loop.time() >= deadline:
                    raise Unavailable(f"etcd at {self.where} did not answer in time", details) from error
                log.debug("etcd call failed, trying again", method=method, endpoint=endpoint.target, error=details)
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
            pause = min(pause * 2, 0.5)


class _Calling:
    """A call in progress. A class and not a generator: every single request passes here."""

    __slots__ = ("_call", "_transport")

    def __init__(self, transport: Transport, call: Any) -> None:
        self._transport = transport
        self._call = call

    def __enter__(self) -> Any:
        self._transport.calls.add(self._call)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.calls.discard(self._call)
        self._call.cancel()  # does nothing to a call that has ended
        if kind is asyncio.CancelledError and self._transport.closed:
            # To who waits on a call that `close` ended, that must not look like their own cancellation.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise Unavailable(f"the client of etcd at {self._transport.where} is closed") from error


async def _exchange(call: Any) -> Any:
    """The one answer of a stream whose requests have all been given to it."""
    reply = await call.read()
    if reply is EOF:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the stream ended early", None)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.read()  # let the stream end by itself, which leaves nothing behind in gRPC
    return reply
