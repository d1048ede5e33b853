"""gRPC as moorage uses it: mTLS, errors and trace ids carried across, principals taken from certificates."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
import msgspec
import structlog

from moorage.errors import (
    METADATA_KEY,
    DeadlineExceeded,
    Forbidden,
    MoorageError,
    Unavailable,
    from_wire,
    to_wire,
)
from moorage.tls import SERVER_NAME, TlsFiles

log = structlog.get_logger(__name__)

TRACE_KEY = "moorage-trace"
#: The principal of the caller that the current server call serves: the common name of its certificate.
principal: contextvars.ContextVar[str] = contextvars.ContextVar("moorage_principal", default="")
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


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Client side of mTLS."""
    ca, cert, key = tls.read()
    return grpc.ssl_channel_credentials(ca, key, cert)


def aio_channel(target: str, tls: TlsFiles) -> grpc.aio.Channel:
    """An asynchronous channel to ``host:port``, verified by `SERVER_NAME`."""
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(target, channel_credentials(tls), options=options)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Server side of mTLS: a client without a certificate of the authority fails in the handshake."""
    ca, cert, key = tls.read()
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def aio_server() -> grpc.aio.Server:
    """A server whose handlers may raise `MoorageError` and read `principal` and `trace`."""
    return grpc.aio.server(interceptors=[_ServerInterceptor()], options=_OPTIONS)


async def _abort(context: Any, error: MoorageError) -> NoReturn:
    status = getattr(grpc.StatusCode, error.grpc_status)
    await context.abort(status, str(error), ((METADATA_KEY, to_wire(error)),))
    raise AssertionError("abort returned")


def _enter(context: Any) -> None:
    names = context.auth_context().get("x509_common_name", [])
    principal.set(names[0].decode() if names else "")
    for key, value in context.invocation_metadata() or ():
        if key == TRACE_KEY:
            trace.set(str(value))


class _ServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.response_streaming:
            return self._stream(handler, details.method)
        return self._unary(handler, details.method)

    @staticmethod
    def _unary(handler: Any, method: str) -> Any:
        inner = handler.stream_unary or handler.unary_unary

        async def call(request: Any, context: Any) -> Any:
            _enter(context)
            try:
                return await inner(request, context)
            except MoorageError as error:
                await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                log.exception("rpc failed", method=method)
                await _abort(context, MoorageError(f"{method}: {type(error).__name__}: {error}"))

        make = grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        return make(call, handler.request_deserializer, handler.response_serializer)

    @staticmethod
    def _stream(handler: Any, method: str) -> Any:
        inner = handler.stream_stream or handler.unary_stream

        async def call(request: Any, context: Any) -> Any:
            _enter(context)
            try:
                async for reply in inner(request, context):
                    yield reply
            except MoorageError as error:
                await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                log.exception("rpc failed", method=method)
                await _abort(context, MoorageError(f"{method}: {type(error).__name__}: {error}"))

        make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
        return make(call, handler.request_deserializer, handler.response_serializer)


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
        return Unavailable(f"{what} cannot be reached", f"is it running? {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{what} did not answer in time")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Forbidden(f"{what} refused this caller: {details}")
    return MoorageError(f"{what}: {code.name if code else 'error'}: {details}")


def metadata(trace_id: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of an outgoing call: the trace id given, else the current one."""
    value = trace_id or trace.get()
    return ((TRACE_KEY, value),) if value else ()


async def unary(call: Callable[..., Any], request: Any, *, what: str, timeout: float | None, trace_id: str = "") -> Any:
    """Make one unary call. Raises what the server raised, or `Unavailable` / `DeadlineExceeded` naming ``what``."""
    try:
        result = call(request, timeout=timeout, metadata=metadata(trace_id))
        return await result if inspect.isawaitable(result) else result
    except grpc.RpcError as error:
        raise translate(error, what) from error
