"""gRPC as moorage uses it: mTLS, errors and trace ids carried across, principals taken from certificates."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
import msgspec
import structlog

from moorage import roles, skew
from moorage.errors import (
    METADATA_KEY,
    DeadlineExceeded,
    Forbidden,
    MoorageError,
    NoCapacity,
    Unavailable,
    from_wire,
    to_wire,
)
from moorage.roles import NOBODY, UNKNOWN, Identity, Rule
from moorage.tls import SERVER_NAME, TlsFiles

if TYPE_CHECKING:
    from moorage.access import Gate

log = structlog.get_logger(__name__)

TRACE_KEY = "moorage-trace"
_FIRST_SECONDS = 5.0
_REFUSED_SECONDS = 0.2
#: Initial metadata of a streamed call that was taken.
ACCEPTED = (("moorage-accepted", "1"),)
#: The principal of the caller that the current server call serves: the common name of its certificate.
principal: contextvars.ContextVar[str] = contextvars.ContextVar("moorage_principal", default="")
#: The whole of who calls, and the rule of the method that is called.
caller: contextvars.ContextVar[Identity] = contextvars.ContextVar("moorage_caller", default=NOBODY)
rule: contextvars.ContextVar[Rule] = contextvars.ContextVar("moorage_rule", default=UNKNOWN)
#: The job that the current call turned out to be about, and its owner; a list, so that the handler's task can fill it.
subject: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("moorage_subject", default=None)
#: The trace id of the current call; client calls made from within it carry it on.
trace: contextvars.ContextVar[str] = contextvars.ContextVar("moorage_trace", default="")

_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]
#: By default a second server may listen on the same port, and takes half of the first one's connections.
_SERVER_OPTIONS = [*_OPTIONS, ("grpc.so_reuseport", 0)]


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Client side of mTLS."""
    ca, cert, key = tls.read()
    return grpc.ssl_channel_credentials(ca, key, cert)


def aio_channel(target: str, tls: TlsFiles) -> grpc.aio.Channel:
    """An asynchronous channel to any server of the cluster at ``host:port``, verified by `SERVER_NAME`."""
    return channel(target, channel_credentials(tls), SERVER_NAME)


def channel(target: str, credentials: grpc.ChannelCredentials, name: str) -> grpc.aio.Channel:
    """An asynchronous channel to a server whose certificate must have ``name``."""
    return grpc.aio.secure_channel(target, credentials, options=[*_OPTIONS, ("grpc.ssl_target_name_override", name)])


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Server side of mTLS: a client without a certificate of the authority fails in the handshake.

    Certificates that are replaced on disk are used from the next handshake on. Raises `OSError`.
    """
    fresh = _Fresh(tls)
    return grpc.dynamic_ssl_server_credentials(fresh.first, fresh, require_client_authentication=True)


class _Fresh:
    """What gRPC asks at every handshake: a configuration, or None while the files are the same."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._stamp = tls.stamp()
        self.first = self._configuration()

    def _configuration(self) -> Any:
        ca, cert, key = self._tls.read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def __call__(self) -> Any:
        found = self._tls.stamp()
        if found == self._stamp:
            return None
        try:
            configuration = self._configuration()
        except OSError as error:  # being replaced: the next handshake sees it
            log.warning("certificate not read", error=str(error))
            return None
        self._stamp = found
        return configuration


def aio_server(gate: Gate | None = None, *first: grpc.aio.ServerInterceptor) -> grpc.aio.Server:  # type: ignore[type-arg]
    """A server whose handlers may raise `MoorageError` and read `principal`, `caller` and `trace`.

    ``gate`` decides who may call what; without one every certificate of the authority may call everything. ``first``:
    interceptors that see a call before all else.
    """
    return grpc.aio.server(interceptors=[*first, _ServerInterceptor(gate)], options=_SERVER_OPTIONS)


def about(job: str, owner: str) -> None:
    """Note what the current call is about, and raise `Forbidden` unless the caller may do it to a job of ``owner``."""
    noted = subject.get()
    if noted is not None:
        noted[:] = [job, owner]
    roles.check_owner(caller.get(), rule.get(), owner, job)


async def _abort(context: Any, error: MoorageError) -> NoReturn:
    status = getattr(grpc.StatusCode, error.grpc_status)
    await context.abort(status, str(error), ((METADATA_KEY, to_wire(error)),))
    raise AssertionError("abort returned")


class _Call:
    """One call as the gate sees it: entered once, told to the audit trail once."""

    def __init__(self, gate: Gate | None, method: str, context: Any) -> None:
        self._gate = gate
        self._method = method
        self._context = context
        self._auth = context.auth_context()
        self._told = False
        self.entered = False

    def enter(self) -> None:
        """Set what the handler may read. Raises `Forbidden`."""
        names = self._auth.get("x509_common_name", [])
        principal.set(names[0].decode() if names else "")
        subject.set([])
        version = ""
        for key, value in self._context.invocation_metadata() or ():
            if key == TRACE_KEY:
                trace.set(str(value))
            elif key == skew.KEY:
                version = str(value)
        if self._gate is not None:
            caller.set(self._gate.identify(self._auth))
            rule.set(self._gate.admit(self._auth, self._method))
        skew.check(version, names[0].decode() if names else "the caller")
        self.entered = True

    def still(self) -> None:
        """Raise `Forbidden` when the caller's certificate is good no longer."""
        if self._gate is not None:
            self._gate.check(self._auth)

    def tell(self, error: Forbidden | None = None) -> None:
        """To the audit trail: what was refused, and what the rule wants to be noted."""
        gate = self._gate
        if gate is None or gate.audit is None or self._told or (error is None and not rule.get().audited):
            return
        self._told = True
        job, owner = (subject.get() or ["", ""])[:2]
        gate.audit(
            roles.Attempt(
                time=time.time(),
                identity=caller.get(),
                method=self._method.rpartition("/")[2],
                allowed=error is None,
                peer=self._context.peer(),
                job=job,
                owner=owner,
                trace=trace.get(),
                reason=error.message if error else "",
            )
        )

    async def failed(self, error: Exception) -> None:
        """Carry what a handler raised to the caller."""
        if isinstance(error, Forbidden):
            self.tell(error)
        elif isinstance(error, MoorageError) and self.entered:
            self.tell()  # it was allowed, and did not work
        if isinstance(error, OSError) and error.errno in _FULL:
            where = f" ({error.filename})" if error.filename else ""
            error = NoCapacity(
                f"no space is left{where}", "make room there; `moorage doctor --node NODE` says where it lacks"
            )
        if isinstance(error, MoorageError):
            await _abort(self._context, error)
        if isinstance(error, grpc.aio.AbortError):
            raise error
        log.error("rpc failed", method=self._method, exc_info=error)
        await _abort(self._context, MoorageError(f"{self._method}: {type(error).__name__}: {error}"))


_FULL = {errno.ENOSPC, errno.EDQUOT}


class _ServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.response_streaming:
            return self._stream(handler, details.method)
        return self._unary(handler, details.method)

    def _unary(self, handler: Any, method: str) -> Any:
        inner = handler.stream_unary or handler.unary_unary

        async def answer(request: Any, context: Any) -> Any:
            call = _Call(self._gate, method, context)
            try:
                call.enter()
                reply = await inner(request, context)
            except Exception as error:
                await call.failed(error)
            else:
                call.tell()
                return reply

        make = grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _stream(self, handler: Any, method: str) -> Any:
        inner = handler.stream_stream or handler.unary_stream

        async def answer(request: Any, context: Any) -> Any:
            call = _Call(self._gate, method, context)
            try:
                call.enter()
                async for reply in inner(request, context):
                    call.tell()
                    call.still()
                    yield reply
                call.tell()
            except Exception as error:
                if handler.stream_stream and not call.entered:
                    await _first_of(request)
                await call.failed(error)

        make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
        return make(answer, handler.request_deserializer, handler.response_serializer)


async def _first_of(requests: Any) -> None:
    """Take the first message of a call that is refused: a caller whose sending fails does not see the refusal."""
    with contextlib.suppress(TimeoutError, StopAsyncIteration, grpc.RpcError):
        async with asyncio.timeout(_FIRST_SECONDS):
            await anext(aiter(requests))


def translate(error: grpc.RpcError, what: str) -> MoorageError:
    """The `MoorageError` that a failed call stands for; ``what`` names the peer for connection errors."""
    aio = error if isinstance(error, grpc.aio.AioRpcError) else None
    metadata: Any = aio.trailing_metadata() if aio else getattr(error, "trailing_metadata", tuple)()
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                return from_wire(value)
            except msgspec.DecodeError:
                break
    code = error.code() if hasattr(error, "code") else None
    details = error.details() if hasattr(error, "details") else str(error)
    if code == grpc.StatusCode.UNAVAILABLE:
        return unreachable(what, details or "")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{what} did not answer in time")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Forbidden(f"{what} refused this caller: {details}")
    return MoorageError(f"{what}: {code.name if code else 'error'}: {details}")


def unreachable(what: str, details: str) -> Unavailable:
    """The error for a peer that a connection to could not be made, by what TLS or gRPC said of it."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return Unavailable(
            f"{what} is of another authority: its certificate is not one that is trusted here",
            "is tls.ca of its cluster? A cluster that is gone may have left its port to another",
        )
    if "Socket closed" in details:
        return Unavailable(
            f"{what} cannot be reached: it closed the connection",
            f"is it going down, or is this certificate none of its cluster (tls.cert)? {details}",
        )
    return Unavailable(f"{what} cannot be reached", f"is it running? {details}")


async def accepted(call: Any) -> bool:
    """Whether the server has taken a streamed call whose first message was sent (it says `ACCEPTED`), so that more can
    be sent. A server that does not say so has either refused it, which shows at once, or is one that never does."""
    first = await call.initial_metadata()
    if any(key == ACCEPTED[0][0] for key, _ in first or ()):
        return True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.code())), _REFUSED_SECONDS)
    return not call.done()


def metadata(trace_id: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of an outgoing call: our version, and the trace id given, else the current one."""
    value = trace_id or trace.get()
    version = (skew.KEY, skew.said())
    return (version, (TRACE_KEY, value)) if value else (version,)


async def unary(call: Callable[..., Any], request: Any, *, what: str, timeout: float | None, trace_id: str = "") -> Any:
    """Make one unary call. Raises what the server raised, or `Unavailable` / `DeadlineExceeded` naming ``what``."""
    try:
        result = call(request, timeout=timeout, metadata=metadata(trace_id))
        return await result if inspect.isawaitable(result) else result
    except grpc.RpcError as error:
        raise translate(error, what) from error
