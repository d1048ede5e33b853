"""Counts and times the calls that a gRPC server answers. Methods and codes are few and fixed, so the labels are."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor; it goes first."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = Counter(
            "moorage_rpc_requests", "Calls answered, by method and gRPC status.", ["method", "code"], registry=registry
        )
        self._seconds = Histogram(
            "moorage_rpc_duration_seconds",
            "Time to answer a call with one reply.",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        name = details.method.rpartition("/")[2]
        return self._stream(handler, name) if handler.response_streaming else self._unary(handler, name)

    def _told(self, name: str, context: Any, error: BaseException | None) -> None:
        code = context.code()
        if error is not None and not code:
            code = grpc.StatusCode.CANCELLED
        # What a handler that answered never set reads as 0 or None.
        text = code.name if isinstance(code, grpc.StatusCode) else "OK" if not code else str(code)
        self._count.labels(name, text).inc()

    def _unary(self, handler: Any, name: str) -> Any:
        inner = handler.stream_unary or handler.unary_unary

        async def answer(request: Any, context: Any) -> Any:
            began = time.monotonic()
            try:
                reply = await inner(request, context)
            except BaseException as error:
                self._told(name, context, error)
                raise
            self._seconds.labels(name).observe(time.monotonic() - began)
            self._told(name, context, None)
            return reply

        make = grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _stream(self, handler: Any, name: str) -> Any:
        inner = handler.stream_stream or handler.unary_stream

        async def answer(request: Any, context: Any) -> Any:
            try:
                async for reply in inner(request, context):
                    yield reply
            except BaseException as error:
                self._told(name, context, error)
                raise
            self._told(name, context, None)

        make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
        return make(answer, handler.request_deserializer, handler.response_serializer)
