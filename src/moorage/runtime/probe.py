"""Ask the machine what it can do, harmlessly: in throw-away namespaces and folders, leaving nothing behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
from pathlib import Path

from moorage.errors import EnvironmentLacking
from moorage.runtime import programs
from moorage.runtime.programs import Version

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_SOCK_DESTROY = 21
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 0x1, 0x4, 0x300
_NLMSG_ERROR = 2
_ALL_STATES = 0xFFFFFFFF

#: A table such as pods need: address translation, connection state, and a drop in both directions.
_RULES = """
table ip moorage_doctor {
    chain postrouting { type nat hook postrouting priority srcnat; ip saddr 100.64.0.0/11 masquerade; }
    chain prerouting { type nat hook prerouting priority dstnat; tcp dport 1 dnat to 100.64.0.1:1; }
    chain forward { type filter hook forward priority filter; ct state established,related accept; }
}
table inet moorage_doctor {
    chain input { type filter hook input priority filter; iifname "job0" drop; }
    chain output { type filter hook output priority filter; oifname "job0" drop; }
}
"""

_LINKS = {
    "veth": ["type", "veth", "peer", "name", "probe1"],
    "bridge": ["type", "bridge"],
    "vxlan": ["type", "vxlan", "id", "1", "local", "127.0.0.1", "dstport", "4789"],
}


def _diag_request(kind: str) -> bytes:
    """The body of a dump request to the kernel's socket monitor."""
    if kind in ("tcp", "udp"):
        protocol = socket.IPPROTO_TCP if kind == "tcp" else socket.IPPROTO_UDP
        return struct.pack("=BBBxI48x", socket.AF_INET, protocol, 0, _ALL_STATES)
    if kind == "unix":
        return struct.pack("=BBHIII8x", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, 1)
    if kind == "netlink":
        return struct.pack("=BBHIII8x", socket.AF_NETLINK, 255, 0, 0, 1, 0)
    if kind == "packet":
        return struct.pack("=BBHIII4x", socket.AF_PACKET, 0, 0, 0, 1, 0)
    raise ValueError(kind)


def _ask_diag(message: int, flags: int, body: bytes) -> int:
    """Send one request to the socket monitor; the error number of its first answer, 0 for none."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(5.0)
        channel.send(struct.pack("=IHHII", 16 + len(body), message, _NLM_F_REQUEST | flags, 1, 0) + body)
        answer = channel.recv(65536)
    kind = struct.unpack_from("=H", answer, 4)[0]
    return -int(struct.unpack_from("=i", answer, 16)[0]) if kind == _NLMSG_ERROR else 0


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


class Prober:
    """The real machine. Tests stand in for it with objects that answer otherwise.

    What is tried answers with an empty string for success, or with one line that says what the machine said.
    """

    def user(self) -> int:
        """Effective user id."""
        return os.geteuid()

    def capabilities(self) -> int:
        """The mask of effective capabilities."""
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.M)
        return int(found.group(1), 16) if found else 0

    def hard_limit(self, name: str) -> int:
        """This process's hard limit (a name of `resource`); 2**64 - 1 for none."""
        hard = resource.getrlimit(getattr(resource, name))[1]
        return 2**64 - 1 if hard == resource.RLIM_INFINITY else hard

    def limits_library(self) -> tuple[str, str]:
        """Path of what is preloaded into CRIU, and what is wrong with it; empty: nothing."""
        from moorage.worker.sandbox import criu

        try:
            found = criu.find_library()
        except EnvironmentLacking as error:
            return "", error.message
        return str(found), criu.lacking(found)

    def kernel(self) -> str:
        """Release, such as 6.12.0-1-amd64."""
        return os.uname().release

    def program(self, name: str) -> tuple[str, Version | None]:
        """Path and version of the program that moorage would use, or of one that is too old; empty path: none."""
        try:
            path = programs.find(name)
        except EnvironmentLacking:
            own = programs.on_path(name)
            if own is None:
                return "", None
            path = own
        return str(path), programs.version(name, path)

    def _run(self, *command: str, text: str | None = None) -> str:
        try:
            done = subprocess.run(list(command), input=text, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else _first_line(done.stderr or done.stdout)

    def _find(self, name: str) -> str:
        return self.program(name)[0] or name

    def criu_check(self) -> str:
        return self._run(self._find("criu"), "check")

    def runc_namespaces(self) -> set[str]:
        """The kinds of namespace that runc can make."""
        try:
            answer = subprocess.run(
                [self._find("runc"), "features"], capture_output=True, text=True, timeout=30, check=False
            )
            return set(json.loads(answer.stdout)["linux"]["namespaces"])
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            return set()

    def link(self, kind: str) -> str:
        """Make a link (veth, bridge, vxlan) in a throw-away network namespace."""
        return self._run("unshare", "--net", self._find("ip"), "link", "add", "probe0", *_LINKS[kind])

    def nftables(self) -> str:
        """Load rules such as pods need in a throw-away network namespace."""
        return self._run("unshare", "--net", self._find("nft"), "-f", "-", text=_RULES)

    def plug(self) -> str:
        """Add the queueing discipline that holds packets, in a throw-away network namespace."""
        tool = programs.on_path("tc")
        return (
            self._run("unshare", "--net", str(tool), "qdisc", "add", "dev", "lo", "root", "plug") if tool else "no tc"
        )

    def overlay(self, folder: Path) -> str:
        """Mount an overlay with its upper layer in ``folder``, in a throw-away mount namespace, and change a file."""
        try:
            scratch = Path(tempfile.mkdtemp(prefix=".moorage-doctor-", dir=nearest(folder)))
        except OSError as error:
            return f"{folder}: {error.strerror}"
        try:
            return self._overlay_in(scratch)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _overlay_in(self, scratch: Path) -> str:
        for name in ("lower", "upper", "work", "merged"):
            (scratch / name).mkdir()
        (scratch / "lower" / "file").write_text("x")
        options = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work"
        script = 'mount -t overlay moorage-doctor -o "$1" "$2/merged" && rm "$2/merged/file" && test -c "$2/upper/file"'
        return self._run("unshare", "--mount", "--", "sh", "-c", script, "sh", options, str(scratch))

    def diag(self, kind: str) -> str:
        """Ask the kernel for its sockets of a kind (tcp, udp, unix, netlink, packet), as CRIU does."""
        try:
            code = _ask_diag(_SOCK_DIAG_BY_FAMILY, _NLM_F_DUMP, _diag_request(kind))
        except OSError as error:
            code = error.errno or errno.EIO
        return os.strerror(code) if code else ""

    def socket_destroy(self) -> str:
        """Whether the kernel can reset a connection; asked about one that does not exist."""
        body = struct.pack("=BBBxI48x", socket.AF_INET, socket.IPPROTO_TCP, 0, _ALL_STATES)
        try:
            code = _ask_diag(_SOCK_DESTROY, _NLM_F_ACK, body)
        except OSError as error:
            code = error.errno or errno.EIO
        return "" if code in (0, errno.ENOENT) else os.strerror(code)

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def freezer(self) -> str:
        """Make a cgroup that can be frozen, and remove it."""
        parent = freezer_folder(Path("/proc/self/mountinfo").read_text())
        if parent is None:
            return "no cgroup hierarchy with a freezer is mounted"
        group = parent / f"moorage-doctor-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            return f"{group}: {error.strerror}"
        try:
            if not ((group / "freezer.state").exists() or (group / "cgroup.freeze").exists()):
                return f"{parent} has no freezer"
            return ""
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()

    def free_bytes(self, folder: Path) -> int:
        """Free space where ``folder`` is or would be."""
        status = os.statvfs(nearest(folder))
        return status.f_bavail * status.f_frsize

    def memory_bytes(self) -> int:
        """The machine's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nearest(folder: Path) -> Path:
    """``folder``, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def freezer_folder(mountinfo: str) -> Path | None:
    """Where cgroups are made that can be frozen: the freezer of version 1, else the only hierarchy of version 2."""
    unified = None
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        if kind == "cgroup" and "freezer" in options:
            return Path(fields[4])
        if kind == "cgroup2":
            unified = Path(fields[4])
    return unified
