"""A store, what is in it, and other processes that use it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moorage.store import Content, GlobalManifest, PodManifest, Store

MIB = 1 << 20


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


# What a child process begins with: ``checkpoint(attempt)`` writes the file that it was given.
CHILD = """
import sys
from pathlib import Path
from moorage.store import GlobalManifest, PodManifest, Store

store = Store.open(sys.argv[1])

def checkpoint(attempt):
    facts = dict(job="j", owner="o", attempt=attempt, incarnation=1, created=1.0)
    with store.writer(label="child") as writer:
        content = writer.add_file(Path(sys.argv[2]))
        writer.finish()
        pod = store.write_pod_manifest(PodManifest(pod=0, node=sys.argv[2], images={"a": content}, **facts))
    return store.write_global_manifest(GlobalManifest(pods=[pod], **facts))
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def pod(images: dict[str, Content], attempt: int = 1) -> PodManifest:
    return PodManifest(job="j", owner="o", pod=0, incarnation=1, attempt=attempt, node="n", created=1.0, images=images)


def checkpoint(store: Store, files: Sequence[Path], attempt: int = 1) -> str:
    """Write a whole checkpoint; returns the global manifest's name."""
    with store.writer(label="test") as writer:
        images = {path.name: writer.add_file(path) for path in files}
        writer.finish()
        name = store.write_pod_manifest(pod(images, attempt))
    return store.write_global_manifest(
        GlobalManifest(job="j", owner="o", attempt=attempt, incarnation=1, created=2.0, pods=[name])
    )


def images(store: Store, name: str) -> dict[str, Content]:
    return store.read_pod_manifest(store.read_global_manifest(name).pods[0]).images


def packs(store: Store) -> list[Path]:
    return sorted(Path(store.location, "packs").iterdir())


def alter(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def all_files(store: Store) -> list[str]:
    return sorted(str(p.relative_to(store.location)) for p in Path(store.location).rglob("*") if p.is_file())
