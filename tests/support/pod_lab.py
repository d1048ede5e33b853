"""A pod on this machine for tests: folder, overlay of the host's root, network namespace, guard.

What the real layers and the real network do is left out; what runc, CRIU and the guard do is the real thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from moorage.errors import Unavailable
from moorage.runtime import programs
from moorage.worker import journal
from moorage.worker.guard.client import GuardClient
from moorage.worker.guard.files import guard_alive
from moorage.worker.guard.kernel import now
from moorage.worker.guard.messages import EtcdAccess, GuardConfig, GuardEvent
from moorage.worker.journal_frames import Kind
from moorage.worker.sandbox import criu, oci, podinit
from moorage.worker.sandbox.cgroup import PodCgroup
from tests.support import leftovers

PATH = "/usr/local/bin:/usr/bin:/bin"
#: Nobody listens there: a guard that must ask etcd gets no answer.
NO_ETCD = EtcdAccess(endpoints=["127.0.0.1:1"])


def shell(script: str, rank: int = 0) -> podinit.Rank:
    """A rank that runs a shell script."""
    return podinit.Rank(rank=rank, argv=["sh", "-c", script])


def python(script: str, rank: int = 0) -> podinit.Rank:
    """A rank that runs a Python program, with an interpreter that any user may start."""
    interpreter = shutil.which("python3", path=PATH) or sys.executable
    return podinit.Rank(rank=rank, argv=[interpreter, "-c", script])


class PodLab:
    """One pod's surroundings. Several may follow one another (`successor`), as after a restore."""

    def __init__(
        self, base: Path, *, etcd: EtcdAccess = NO_ETCD, links: Sequence[str] = (), family: list[PodLab] | None = None
    ) -> None:
        self.name = f"mt{secrets.token_hex(4)}"
        self.base = base
        self.etcd = etcd
        self.links = list(links)
        self.folder = base / self.name
        self.root = self.folder / "merged"
        self.upper = self.folder / "upper"
        self.cgroup_path = f"/moorage-test-{self.name}/pod"
        self.cgroup = PodCgroup(self.cgroup_path)
        self._clients: list[GuardClient] = []
        self.family = [] if family is None else family
        self.family.append(self)
        leftovers.made(self.name, self.folder)

    def prepare(self) -> None:
        """Folder, overlay and network namespace."""
        for name in ("upper", "work", "merged"):
            (self.folder / name).mkdir(parents=True, mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)
        self.upper.chmod(0o755)  # is the mode of the pod's root folder
        self.mount()
        _call("ip", "netns", "add", self.name)
        _call("ip", "-n", self.name, "link", "set", "lo", "up")

    def mount(self) -> None:
        layers = f"lowerdir=/,upperdir={self.upper},workdir={self.folder / 'work'}"
        _call("mount", "-t", "overlay", self.name, "-o", layers, str(self.root))

    def lay(self, *ranks: podinit.Rank, **init: Any) -> None:
        """Init, its configuration, and the bundle."""
        env = {"PATH": PATH, "LANG": "C.UTF-8"}
        podinit.install(self.upper, podinit.InitConfig(ranks=ranks, env=env, **init))
        self.bundle(uid=init.get("uid", 0))

    def bundle(self, **changes: Any) -> None:
        netns = Path("/run/netns", self.name)
        oci.write_bundle(
            self.folder,
            oci.PodConfig(
                root=self.root, netns=netns, hostname="pod", cgroup=self.cgroup_path,
                argv=podinit.argv(), criu_config=self.folder / criu.CONFIG_FILE, shm_bytes=64 << 20, **changes,
            ),
        )  # fmt: skip

    def config(self, **changes: Any) -> GuardConfig:
        fields: dict[str, Any] = {
            "cluster": "test", "node": "n1", "job": "job", "pod": 0, "incarnation": 1, "container": self.name,
            "runc_root": str(self.base / "runc"), "bundle": str(self.folder),
            "cgroup": self.cgroup_path, "runc": str(programs.find("runc")),
            "criu": str(programs.find("criu")), "etcd": self.etcd, "cut_links": self.links,
            "deadline": now() + 600,
        }  # fmt: skip
        return GuardConfig(**(fields | changes))

    async def guard(self, **changes: Any) -> GuardClient:
        """A new guard, or a connection to the one that is there."""
        client = await GuardClient.spawn(self.folder, self.config(**changes))
        self._clients.append(client)
        return client

    def successor(self) -> PodLab:
        """A pod laid from this one's upper layer and journal, as a restore on another node lays it."""
        lab = PodLab(self.base, etcd=self.etcd, links=self.links, family=self.family)
        lab.folder.mkdir(mode=0o700)
        _call("cp", "-a", str(self.upper), str(lab.upper))
        journal.export(self.folder / "journal", lab.folder / "journal.exported")
        journal.restore(lab.folder / "journal.exported", lab.folder / "journal")
        lab.prepare()
        lab.bundle()
        return lab

    def text(self, rank: int = 0, kind: int = Kind.STDOUT) -> str:
        """All that a rank wrote, as the journal has it."""
        with journal.JournalReader(self.folder / "journal") as reader:
            found = reader.read(limit=1 << 30).entries
        parts = [entry.frame.payload for entry in found if entry.frame.rank == rank and entry.frame.kind == kind]
        return b"".join(parts).decode()

    def procs(self) -> list[int]:
        return self.cgroup.processes()

    async def remove(self) -> None:
        """Take everything away again, whatever state it is in."""
        for client in self._clients:
            await client.close()
        if guard_alive(self.folder):
            with contextlib.suppress(Exception):
                async with await GuardClient.connect(self.folder) as client:
                    await asyncio.wait_for(client.kill(), 20)
                    await client.exit()
        kill_guard(self.folder)
        await self.cgroup.kill(20)
        if (self.base / "runc" / self.name).exists():
            command = [str(programs.find("runc")), "--root", str(self.base / "runc"), "delete", "--force", self.name]
            await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True)
        self._remove_parents()
        await asyncio.to_thread(_call, "umount", str(self.root), check=False)
        await asyncio.to_thread(_call, "ip", "netns", "del", self.name, check=False)
        if not self.root.is_mount():  # else files would be removed through the mount
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def _remove_parents(self) -> None:
        """runc removes the pod's cgroups, not the folder that they stand in, on any host's kind of cgroups."""
        for pattern in ("moorage-test-", "*/moorage-test-"):
            for parent in Path("/sys/fs/cgroup").glob(pattern + self.name):
                parent.rmdir()


def kill_guard(folder: Path) -> None:
    """SIGKILL to the folder's guard, if there is one."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if b"moorage.worker.guard" in arguments and os.fsencode(folder) in arguments:
                descriptor = os.pidfd_open(int(entry.name))
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], 10)
                os.close(descriptor)


@contextlib.asynccontextmanager
async def pod_lab(base: Path, **changes: Any) -> AsyncIterator[PodLab]:
    """A prepared `PodLab`, and its successors, removed at the end."""
    lab = PodLab(base, **changes)
    try:
        lab.prepare()
        yield lab
    finally:
        for member in lab.family:
            await member.remove()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something that no event announces is so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_event(client: GuardClient, wanted: Callable[[GuardEvent], bool], seconds: float = 60.0) -> GuardEvent:
    """The first event (the status of now included) for which ``wanted`` holds. Raises `Unavailable` when the guard
    ends before it, as an operation would."""
    async with asyncio.timeout(seconds):
        async for event in client.events():
            if wanted(event):
                return event
    raise Unavailable("the guard ended")


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run one asynchronous test with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(240):
            await test()

    asyncio.run(bounded())


def _call(*command: str, check: bool = True) -> None:
    found = programs.find(command[0])
    subprocess.run([str(found), *command[1:]], check=check, capture_output=not check)
