"""Protobuf messages and gRPC stubs from a serialized descriptor set, in a private pool.

The usual generated modules register in protobuf's process-wide pool and refuse a runtime older than their compiler.
A Ray job or an etcd client in the same process may bring either, so nothing here touches the default pool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from moorage.quiet_grpc import grpc


class PrivatePool:
    """All messages, enums and services of one descriptor set (a file written by ``protoc --descriptor_set_out``)."""

    def __init__(self, descriptor_set: Path) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self._files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set.read_bytes())
        for file in self._files.file:
            self._pool.AddSerializedFile(file.SerializeToString())

    def methods(self, service: str) -> list[str]:
        """The names of a service's methods."""
        return [method.name for method in self._pool.FindServiceByName(service).methods]

    def request(self, service: str, method: str) -> Any:
        """The class of a method's request."""
        described = self._pool.FindServiceByName(service).FindMethodByName(method)
        return message_factory.GetMessageClass(described.input_type)

    def message(self, full_name: str) -> Any:
        """The message class called ``full_name``, such as ``moorage.v1.Job``."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def export(self, file_name: str) -> dict[str, Any]:
        """What a generated ``_pb2`` module of ``file_name`` would define: messages, enum wrappers, enum values."""
        from google.protobuf.internal import enum_type_wrapper

        file = self._pool.FindFileByName(file_name)
        names: dict[str, Any] = {"DESCRIPTOR": file}
        for name, message in file.message_types_by_name.items():
            names[name] = message_factory.GetMessageClass(message)
        for name, enum in file.enum_types_by_name.items():
            names[name] = enum_type_wrapper.EnumTypeWrapper(enum)
            names.update((value.name, value.number) for value in enum.values)
        return names

    def _methods(self, service: str) -> list[tuple[str, str, bool, bool, Any, Any]]:
        described = self._pool.FindServiceByName(service)
        proto = descriptor_pb2.ServiceDescriptorProto()
        described.CopyToProto(proto)
        return [
            (
                method.name,
                f"/{service}/{method.name}",
                method.client_streaming,
                method.server_streaming,
                self.message(method.input_type.lstrip(".")),
                self.message(method.output_type.lstrip(".")),
            )
            for method in proto.method
        ]

    def stub(self, service: str) -> type[Any]:
        """A class like the generated ``…Stub``: ``stub(channel).Method(request)``, for sync and aio channels."""
        methods = self._methods(service)

        def __init__(self: Any, channel: Any) -> None:
            for name, path, from_client, from_server, request, reply in methods:
                kind = f"{'stream' if from_client else 'unary'}_{'stream' if from_server else 'unary'}"
                make = getattr(channel, kind)
                call = make(path, request_serializer=request.SerializeToString, response_deserializer=reply.FromString)
                setattr(self, name, call)

        return type(service.rpartition(".")[2] + "Stub", (), {"__init__": __init__})

    def adder(self, service: str) -> Callable[[Any, Any], None]:
        """A function like the generated ``add_…Servicer_to_server(servicer, server)``."""
        methods = self._methods(service)

        def add(servicer: Any, server: Any) -> None:
            handlers: dict[str, Any] = {}
            for name, _, from_client, from_server, request, reply in methods:
                kind = f"{'stream' if from_client else 'unary'}_{'stream' if from_server else 'unary'}"
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                handlers[name] = make(
                    getattr(servicer, name),
                    request_deserializer=request.FromString,
                    response_serializer=reply.SerializeToString,
                )
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

        return add
