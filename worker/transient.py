"""What stands in a kernel queue and cannot be saved from there, but is gone as soon as the program looks: a frozen pod
that holds such a thing is let run for a moment and frozen again."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

from moorage.worker.borrow import borrowed, borrowed_socket, readable_bytes

_LISTENING = "0A"
_PEEK_NOW = 0x42  # MSG_PEEK | MSG_DONTWAIT


def unread(host_pids: Iterable[int], with_connections: bool) -> list[str]:
    """Words for each thing that waits to be read: events of inotify, messages of netlink, connections to accept."""
    pids = list(host_pids)
    ports = waiting_ports(pids[0]) if pids and with_connections else []
    found = [words for pid in pids for words in _queues(pid)]
    return found + [f"a TCP connection to port {port} waits to be accepted" for port in ports]


def _queues(pid: int) -> Iterator[str]:
    folder = Path("/proc", str(pid))
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        netlink: set[str] | None = None
        for link in (folder / "fd").iterdir():
            try:
                target = str(link.readlink())
            except FileNotFoundError:
                continue
            if target.startswith("anon_inode:inotify") and waiting_bytes(pid, int(link.name)):
                yield f"process {pid}, descriptor {link.name}: inotify events wait to be read"
            elif target.startswith("socket:["):
                netlink = _netlink_inodes(folder) if netlink is None else netlink
                if target[8:-1] in netlink and _has_message(pid, int(link.name)):
                    yield f"process {pid}, descriptor {link.name}: netlink messages wait to be read"


def waiting_bytes(pid: int, fd: int) -> int:
    """What a read of this descriptor would give at once."""
    with contextlib.suppress(OSError), borrowed(pid, fd) as copy:
        return readable_bytes(copy)
    return 0


def _netlink_inodes(folder: Path) -> set[str]:
    return {line.split()[-1] for line in (folder / "net" / "netlink").read_text().splitlines()[1:]}


def _has_message(pid: int, fd: int) -> bool:
    try:
        with borrowed_socket(pid, fd) as sock:
            sock.recv(1, _PEEK_NOW)
            return True
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.ESRCH, errno.EBADF)


def waiting_ports(pid: int) -> list[int]:
    """Ports whose listening sockets, in the network of this process, hold connections that were not accepted yet."""
    ports = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc", str(pid), "net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[4].partition(":")[2], 16):
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)
