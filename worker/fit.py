"""Whether this node has all that a pod needs: looked at when a node is chosen, and again before a restore begins."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moorage.compat import FileMark, Found, JobFingerprint, Verdict, job_from, judge, loaded
from moorage.compat.fingerprint import SeenFile
from moorage.errors import Incompatible
from moorage.store import PodManifest
from moorage.worker.agent_node import Node
from moorage.worker.pod_files import NodeFiles


def verdict(node: Node, job: JobFingerprint) -> Verdict:
    """Judge a pod's fingerprint against this node. Blocks: files of equal size whose digests are not known are read."""
    return judge(job, node.fingerprint, find(node, job))


def find(node: Node, job: JobFingerprint) -> Found:
    """What this node has of what the pod needs."""
    with NodeFiles(job.image, job.layers, job.mounts) as files:
        marks = (*job.files, *(job.model.index if job.model else ()))
        # Side by side: a restore waits for this, and the first time gigabytes may have to be read.
        with ThreadPoolExecutor(min(8, node.cpus), "digests") as pool:
            looked = pool.map(lambda mark: _look(node, files, mark), marks)
            seen = {mark.path: found for mark, found in zip(marks, looked, strict=True) if found is not None}
        packages = {
            rule: version
            for rule, package in job.packages.items()
            if package.folder
            and (version := loaded.version_in(_metadata_name(rule, package.name), files.entries(package.folder)))
        }
    with contextlib.suppress(OSError):
        node.digests.save()
    return Found(
        files=seen,
        packages=packages,
        sources=tuple(mount.source for mount in job.mounts if Path(mount.source).exists()),
        image=not job.image or Path(job.image).is_dir(),
    )


def _look(node: Node, files: NodeFiles, mark: FileMark) -> SeenFile | None:
    """What is under a path; None for nothing, or nothing that can be read."""
    fd = files.open(mark.path)
    if fd is None:
        return None
    try:
        size = os.fstat(fd).st_size
        return SeenFile(size=size, digest=node.digests.of(fd, sampled=mark.live)[1] if size == mark.size else "")
    except OSError:
        return None
    finally:
        os.close(fd)


def _metadata_name(rule: str, name: str) -> str:
    if rule in ("cuda", "nccl"):
        return rule
    return next((sign.package for sign in loaded.ENGINES if sign.engine == name), name)


def verify(node: Node, manifest: PodManifest, checkpoint: str) -> None:
    """Raise `Incompatible`, naming everything that differs, unless the pod of this manifest can be restored here."""
    if manifest.extra.get("finished"):
        return  # no process of it comes back
    found = verdict(node, job_from(manifest.fingerprint))
    if not found.fits:
        raise Incompatible(
            f"the checkpoint does not fit node {node.name}: {found.summary}",
            f"`moorage compat {checkpoint or 'CHECKPOINT'} {node.name}` prints every rule",
        )
