"""Does on demand what a checkpoint refuses, each in a child of its own, and counts on meanwhile.

Usage: ``offender.py FOLDER``. A file ``FOLDER/do-NAME`` starts the offence NAME: a child does it and writes
``FOLDER/done-NAME`` (with what it has to say); when ``do-NAME`` is removed the child is killed. ``FOLDER/stop`` ends it
all. Descriptors from outside come over the unix socket ``FOLDER/giver``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pathlib
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_folder = pathlib.Path(sys.argv[1])
_kept: list[object] = []


def _given(name: str) -> int:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(_folder / "giver"))
        asking.sendall(name.encode())
        return socket.recv_fds(asking, 10, 1)[1][0]


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def given() -> str:
    """Only holds a descriptor of the outside."""
    return ""


def traced() -> str:
    victim = os.fork()
    if victim == 0:
        while True:
            time.sleep(1000)
    if _libc.ptrace(0x4206, victim, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
    return str(victim)


def fifo() -> str:
    _kept.append(os.open(_folder / "fifo", os.O_WRONLY))
    return ""


def lock() -> str:
    fd = os.open(_folder / "locked", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 10)
    return ""


def unix_peer() -> str:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(_folder / "listener"))
    _kept.append(connection)
    return ""


def io_uring() -> str:
    try:
        _call(425, 8, ctypes.create_string_buffer(120))
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "worked"


def raw_socket() -> str:
    _kept.append(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    return ""


def packet_socket() -> str:
    _kept.append(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
    return ""


def aio() -> str:
    context = ctypes.c_ulong()
    _call(206, 16, ctypes.byref(context))
    source, _ = os.pipe()
    # A request that waits until the pipe can be read: in flight for ever. IOCB_CMD_POLL is 5, POLLIN 1.
    block = ctypes.create_string_buffer(struct.pack("<QIIHhIQQqQII", 0, 0, 0, 5, 0, source, 1, 0, 0, 0, 0, 0))
    blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    _kept.extend((block, blocks))
    return f"{_call(209, context, 1, blocks)} in flight"


def sysv_outside() -> str:
    segment = int(_libc.shmget(int((_folder / "key").read_text()), 0, 0))
    return "attached" if segment >= 0 else errno.errorcode[ctypes.get_errno()]


def user_timeout() -> str:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.setsockopt(socket.SOL_TCP, socket.TCP_USER_TIMEOUT, 1500)
    _kept.extend((server, client, server.accept()))
    return ""


def shared_client() -> str:
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind("\0shared client")
    listener.listen()
    client.connect("\0shared client")
    client.sendall(b"not accepted")
    if os.fork() == 0:
        while True:
            time.sleep(1000)
    _kept.extend((listener, client))
    return ""


def unlinked_listener() -> str:
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(str(_folder / "soon gone"))
    listener.listen()
    client.connect(str(_folder / "soon gone"))
    client.sendall(b"not accepted")
    (_folder / "soon gone").unlink()
    _kept.extend((listener, client))
    return ""


def stopped() -> str:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(1000)
    os.waitpid(pid, os.WUNTRACED)
    return ""


def nested() -> str:
    if _libc.unshare(0x10000000 | 0x20000000):
        raise OSError(ctypes.get_errno(), "unshare")
    if os.fork() == 0:
        while True:
            time.sleep(1000)
    return ""


OFFENCES: dict[str, Callable[[], str]] = {
    name: value for name, value in globals().items() if callable(value) and getattr(value, "__module__", "") == __name__
}


def start(name: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    _libc.prctl(1, signal.SIGKILL)
    try:
        if name.startswith("given-"):
            _kept.append(_given(name.removeprefix("given-")))
            words = str(_kept[-1])
        else:
            words = OFFENCES[name]()
    except OSError as error:
        words = f"failed: {error}"
    new = _folder / f"new-{name}"
    new.write_text(words)
    new.rename(_folder / f"done-{name}")
    while True:
        time.sleep(1000)


def main() -> None:
    children: dict[str, int] = {}
    count = 0
    while not (_folder / "stop").exists():
        count += 1
        (_folder / "count").write_text(str(count))
        wanted = {path.name.removeprefix("do-") for path in _folder.glob("do-*")}
        for name in wanted - set(children):
            children[name] = start(name)
        for name in set(children) - wanted:
            os.killpg(children[name], signal.SIGKILL)
            os.waitpid(children.pop(name), 0)
            (_folder / f"done-{name}").unlink()
        time.sleep(0.01)
    for pid in children.values():
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
