"""Other people: clients with certificates of their own, and processes of other users of this machine."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moorage import Client, trust
from moorage.config import ClientConfig
from moorage.tls import TlsFiles
from tests.support.cluster import DevCluster

ANN, BOB = "nobody", "www-data"  # accounts that every Debian has


def certificate(cluster: DevCluster, principal: str, role: str | None = None, name: str = "") -> TlsFiles:
    """A certificate of the cluster's authority."""
    folder = cluster.folder / "people" / (name or f"{principal}-{role}".replace(":", "-"))
    if not (folder / "cert.pem").exists():
        trust.issue(cluster.folder / "state" / "authority", folder, principal, role=role)
    return TlsFiles.in_folder(folder)


@contextlib.contextmanager
def person(cluster: DevCluster, account: str, role: str = "operate") -> Iterator[Client]:
    """A client of ``user:<account>``."""
    tls = certificate(cluster, f"user:{account}", role)
    config = ClientConfig(coordinator=cluster.config.coordinator, tls=tls, name=f"user:{account}")
    with Client(config=config, patience=10.0) as client:
        yield client


def as_user(uid: int, work: Callable[[], None]) -> str:
    """Run ``work`` in a process of that user; its last words if it failed, else nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reading)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
            code = 0
        except BaseException:
            os.write(writing, traceback.format_exc().splitlines()[-1].encode()[:4000])
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return words or ("" if status == 0 else f"status {status}")


def unreadable(uid: int, paths: Iterator[Path]) -> list[str]:
    """Those of the paths that a process of that user could open after all (as root sees them now)."""
    found = [str(path) for path in paths]

    def work() -> None:
        opened = []
        for path in found:
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                opened.append(path)
        assert not opened, opened

    words = as_user(uid, work)
    return [words] if words else []


def output_of(job: Any, script: str) -> str:
    """What a shell script says in the job's pod."""
    said: list[bytes] = []
    job.exec(["/bin/sh", "-c", script], output=lambda data, *_: said.append(data))
    return b"".join(said).decode(errors="replace")
