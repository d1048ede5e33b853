"""Whether this node has all that a pod needs: looked at when a node is chosen, and again before a restore begins."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from moorage.compat import Found, JobFingerprint, Verdict, job_from, judge, loaded
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
        seen: dict[str, SeenFile] = {}
        for mark in (*job.files, *(job.model.index if job.model else ())):
            fd = files.open(mark.path)
            if fd is None:
                continue
            try:
                size = os.fstat(fd).st_size
                digest = node.digests.of(fd, sampled=mark.live)[1] if size == mark.size else ""
                seen[mark.path] = SeenFile(size=size, digest=digest)
            except OSError:
                continue  # it cannot be read: as good as absent
            finally:
                os.close(fd)
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
