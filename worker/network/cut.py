"""The fence: a pod's cables pulled and plugged in again from the host's side, by device name alone.

The guard uses this when its deadline has passed, with nothing but two names. So: standard library only, one netlink
message for each device, no reply longer than an acknowledgement.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence

_RTM_NEWLINK = 16
_NLMSG_ERROR = 2
_NLM_F_REQUEST, _NLM_F_ACK = 0x1, 0x4
_IFLA_IFNAME = 3
_IFF_UP = 0x1
_HEADER = struct.Struct("=IHHII")
_IFINFO = struct.Struct("=BxHiII")
_ERROR = struct.Struct("=i")


def _set_flags(channel: socket.socket, name: str, flags: int) -> bool:
    """Set or clear IFF_UP; False when there is no such device."""
    encoded = name.encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(encoded), _IFLA_IFNAME) + encoded
    body = _IFINFO.pack(socket.AF_UNSPEC, 0, 0, flags, _IFF_UP) + attribute + b"\0" * (-len(attribute) % 4)
    length = _HEADER.size + len(body)
    channel.send(_HEADER.pack(length, _RTM_NEWLINK, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0) + body)
    reply = channel.recv(4096)
    _, kind, _, _, _ = _HEADER.unpack_from(reply)
    code = -_ERROR.unpack_from(reply, _HEADER.size)[0] if kind == _NLMSG_ERROR else errno.EPROTO
    if code in (errno.ENODEV, errno.ENOENT):
        return False
    if code:
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return True


def _all(names: Sequence[str], flags: int) -> int:
    found = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as channel:
        channel.bind((0, 0))
        for name in names:
            found += _set_flags(channel, name, flags)
    return found


def cut_by_names(host_devices: Sequence[str]) -> int:
    """Take the devices down: no frame leaves or enters the pod. Idempotent; returns how many exist.

    Raises `OSError`.
    """
    return _all(host_devices, 0)


def uncut_by_names(host_devices: Sequence[str]) -> int:
    """Bring the devices up again. The kernel puts back the addresses' routes; bridge ports and their entries stayed.

    Idempotent; returns how many exist. Raises `OSError`.
    """
    return _all(host_devices, _IFF_UP)
