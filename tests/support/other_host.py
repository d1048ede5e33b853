"""A node of an embedded cluster whose worker sees other files than the rest of this machine."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moorage.dev import roles
from tests.support.cluster import DevCluster
from tests.support.worker_rig import wait_for


@contextmanager
def bound_to_itself(folder: Path) -> Iterator[None]:
    """``folder`` as a mount point, so that pods get a layer of it."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def other_files(cluster: DevCluster, node: str, binds: Mapping[Path, Path]) -> Iterator[None]:
    """Within the block the node's worker has a mount namespace of its own; each key shows its value's files there."""
    cluster.stop(node)
    role = roles.role(cluster.record, node)
    lines = [f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(point))}" for point, source in binds.items()]
    script = " && ".join([*lines, f"exec {shlex.join(role.argv)}"])
    path = cluster.folder / f"{node}.other.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **role.environment},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: b"serving" in path.read_bytes(), f"{node} does not serve")
        yield
    finally:
        process.terminate()
        process.wait(30)
        cluster.start(node)
    client = cluster.client()
    wait_for(lambda: any(known.node == node and known.live for known in client.nodes()), f"{node} is not back")
