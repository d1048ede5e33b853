"""Every error that moorage raises on purpose, and the exit code and gRPC status that each one means.

::

    MoorageError                200  something failed that has no class of its own
     ├─ UsageError              201  the request itself is wrong (a flag, a name, a file)
     ├─ NotFound                202  an unknown job, node, checkpoint or path
     ├─ Conflict                203  the name is taken, or the job is in a state that forbids the request
     ├─ Refused                 204  something in the pod cannot be saved; nothing was touched
     ├─ NoCapacity              205  no placement: too few nodes, GPUs or too little space
     ├─ EnvironmentLacking      206  the machine lacks something (root, CRIU, runc, a kernel module)
     ├─ Unavailable             207  coordinator, etcd, worker or store cannot be reached
     ├─ DeadlineExceeded        208  not done within its time; the job runs on
     ├─ CorruptData             209  a chunk, pack or manifest does not match its digest
     ├─ NewerVersion            210  written by a newer moorage
     ├─ Incompatible            211  the checkpoint does not fit the node
     ├─ AttemptAborted          212  the checkpoint was aborted; the job runs on
     ├─ Forbidden               213  the caller may not do this
     ├─ JobFailed               214  the job ended without an exit code of its own
     ├─ Fenced                  215  a newer leader or incarnation exists; the caller is stale
     ├─ DeviceFailed            216  a GPU or its driver answered with an error
     └─ Differs                  217  a rehearsed job did not compute the same, or was not restored

The message is one line that names the thing; ``hint`` is one line that says what to do. The command line prints
both and exits with ``exit_code``; gRPC carries them in the trailing metadata key ``moorage-error-bin``.
"""

from __future__ import annotations

import errno
from typing import ClassVar

import msgspec


class MoorageError(Exception):
    """Base class. ``message`` names the thing that is wrong, ``hint`` the way out (may be empty)."""

    exit_code: ClassVar[int] = 200
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(MoorageError):
    """The request itself is wrong."""

    exit_code = 201
    grpc_status = "INVALID_ARGUMENT"


class NotFound(MoorageError):
    """A job, node, checkpoint or path that does not exist."""

    exit_code = 202
    grpc_status = "NOT_FOUND"


class Conflict(MoorageError):
    """The name is taken, or the state of the job forbids the request."""

    exit_code = 203
    grpc_status = "FAILED_PRECONDITION"


class Refused(MoorageError):
    """Something in the pod cannot be saved. Raised at prepare, before anything is touched."""

    exit_code = 204
    grpc_status = "FAILED_PRECONDITION"


class NoCapacity(MoorageError):
    """Too few nodes, GPUs, or too little space."""

    exit_code = 205
    grpc_status = "RESOURCE_EXHAUSTED"


class EnvironmentLacking(MoorageError):
    """The machine lacks root, a program, or a kernel feature. ``moorage doctor`` names it too."""

    exit_code = 206
    grpc_status = "FAILED_PRECONDITION"


class Unavailable(MoorageError):
    """Coordinator, etcd, worker or store cannot be reached. Retrying later may help."""

    exit_code = 207
    grpc_status = "UNAVAILABLE"


class DeadlineExceeded(MoorageError):
    """Not done within its time."""

    exit_code = 208
    grpc_status = "DEADLINE_EXCEEDED"


class CorruptData(MoorageError):
    """A chunk, pack or manifest does not match its digest, or is cut short."""

    exit_code = 209
    grpc_status = "DATA_LOSS"


class NewerVersion(MoorageError):
    """A record or object was written by a newer moorage than this one."""

    exit_code = 210
    grpc_status = "FAILED_PRECONDITION"


class Incompatible(MoorageError):
    """The checkpoint does not fit the node."""

    exit_code = 211
    grpc_status = "FAILED_PRECONDITION"


class AttemptAborted(MoorageError):
    """A checkpoint attempt ended in abort. The job runs on as if nothing had been asked."""

    exit_code = 212
    grpc_status = "ABORTED"


class Forbidden(MoorageError):
    """The caller's principal or role does not allow this."""

    exit_code = 213
    grpc_status = "PERMISSION_DENIED"


class JobFailed(MoorageError):
    """The job ended without an exit code of its own (lost with no checkpoint, or restarts used up)."""

    exit_code = 214
    grpc_status = "ABORTED"


class Fenced(MoorageError):
    """The caller acts for a leader, incarnation or attempt that is no longer the current one."""

    exit_code = 215
    grpc_status = "FAILED_PRECONDITION"


class DeviceFailed(MoorageError):
    """A GPU or its driver answered with an error."""

    exit_code = 216
    grpc_status = "INTERNAL"


class Differs(MoorageError):
    """A rehearsed job did not compute the same, or was not restored at all."""

    exit_code = 217
    grpc_status = "ABORTED"


def of_os_error(error: OSError) -> MoorageError:
    """What the system said about a file that somebody named, as one line with a way out."""
    said = f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoCapacity(said, "make room there, or name another place")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentLacking(said, "name another place, or run this as a user who may")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(said, "name another path")
    if error.errno in (errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP):
        return UsageError(said, "name another path")
    return MoorageError(said, "see that the file system is mounted and healthy")


class WireError(msgspec.Struct, frozen=True):
    """An error as it travels in gRPC trailing metadata (``METADATA_KEY``, JSON)."""

    kind: str
    message: str
    hint: str = ""


METADATA_KEY = "moorage-error-bin"


def _classes(root: type[MoorageError]) -> list[type[MoorageError]]:
    return [root, *(found for child in root.__subclasses__() for found in _classes(child))]


def by_name(kind: str) -> type[MoorageError]:
    """The class called ``kind``; `MoorageError` for a name that this version does not know."""
    return next((c for c in _classes(MoorageError) if c.__name__ == kind), MoorageError)


def exit_codes() -> list[tuple[int, str, str]]:
    """Rows ``(code, class name, first line of its docstring)`` of the documented table, in order."""
    return sorted((c.exit_code, c.__name__, (c.__doc__ or "").splitlines()[0]) for c in _classes(MoorageError))


def to_wire(error: MoorageError) -> bytes:
    """Encode ``error`` for the trailing metadata."""
    return msgspec.json.encode(WireError(type(error).__name__, error.message, error.hint))


def from_wire(data: bytes) -> MoorageError:
    """Decode what `to_wire` made. Raises `msgspec.DecodeError` on anything else."""
    wire = msgspec.json.decode(data, type=WireError)
    return by_name(wire.kind)(wire.message, wire.hint)
