"""Between the plain data of `kv` and etcd's messages."""

from __future__ import annotations

from collections.abc import Sequence

from moorage.barrier.etcdpb import kv_pb2, rpc_pb2
from moorage.barrier.kv import Compare, Deleted, DeleteOp, Event, KeyValue, Op, Put, PutOp, TxnResult

_TARGETS = {
    "create": rpc_pb2.Compare.CREATE,
    "mod": rpc_pb2.Compare.MOD,
    "value": rpc_pb2.Compare.VALUE,
}


def range_end(prefix: str) -> bytes:
    """The end of the range of all keys that begin with ``prefix``: its bytes with the last one raised."""
    data = prefix.encode()
    assert data, "an empty prefix would be all of etcd"
    return data[:-1] + bytes([data[-1] + 1])  # UTF-8 has no byte 0xff


def key_value(kv: kv_pb2.KeyValue) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def event(message: kv_pb2.Event) -> Event:
    if message.type == kv_pb2.Event.DELETE:
        return Deleted(message.kv.key.decode(), message.kv.mod_revision)
    return Put(key_value(message.kv))


def revision_of(event: Event) -> int:
    """The revision at which the event happened."""
    return event.mod_revision if isinstance(event, Deleted) else event.kv.mod_revision


def _compare(compare: Compare) -> rpc_pb2.Compare:
    result = rpc_pb2.Compare.EQUAL if compare.equal else rpc_pb2.Compare.NOT_EQUAL
    message = rpc_pb2.Compare(key=compare.key.encode(), target=_TARGETS[compare.target], result=result)
    if isinstance(compare.value, bytes):
        message.value = compare.value
    elif compare.target == "create":
        message.create_revision = compare.value
    else:
        message.mod_revision = compare.value
    return message


def _op(op: Op) -> rpc_pb2.RequestOp:
    key = op.key.encode()
    if isinstance(op, PutOp):
        return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=op.value, lease=op.lease))
    if isinstance(op, DeleteOp):
        end = range_end(op.key) if op.prefix else b""
        return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key, range_end=end))
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def txn(compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> rpc_pb2.TxnRequest:
    return rpc_pb2.TxnRequest(compare=map(_compare, compare), success=map(_op, success), failure=map(_op, failure))


def txn_result(reply: rpc_pb2.TxnResponse) -> TxnResult:
    reads = [r.response_range for r in reply.responses if r.WhichOneof("response") == "response_range"]
    gets = tuple(key_value(read.kvs[0]) if read.kvs else None for read in reads)
    return TxnResult(reply.succeeded, reply.header.revision, gets)
