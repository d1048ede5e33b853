"""What a pod needs of the node that it is restored on: `scan` its processes, then `build` its fingerprint.

The scan reads names only, and is quick: it is done beside CRIU's dump. The files are read afterwards, beside the
running job; a file whose digest is known is not read again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from moorage.compat import FileMark, Gpu, JobFingerprint, ModelMark, MountMark, Package, loaded, model
from moorage.compat.digests import Digests
from moorage.errors import CorruptData
from moorage.worker.guard.files import write_private
from moorage.worker.pod import Pod
from moorage.worker.pod_files import NodeFiles

FILE = "fingerprint.seen"
_PROC = Path("/proc")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a pod had mapped or open, as the pod names it, and the model that they name."""

    paths: tuple[str, ...] = ()
    written: tuple[str, ...] = ()  # of these: open or mapped for writing
    model: model.Named | None = None

    def save(self, staging: Path) -> None:
        """Write it into a staging folder. Raises `OSError`."""
        write_private(staging / FILE, msgspec.json.encode(self))

    @classmethod
    def load(cls, staging: Path) -> Seen:
        """What `save` wrote. Raises `CorruptData`."""
        try:
            return msgspec.json.decode((staging / FILE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise CorruptData(f"{staging / FILE} cannot be read: {error}") from None


def scan(pids: Iterable[int], *, label: str = "", proc: Path = _PROC) -> Seen:
    """Look at the processes with these host pids; one that ends meanwhile is left out. Reads no file of the job."""
    paths: set[str] = set()
    written: set[str] = set()
    commands: list[list[str]] = []
    environment: dict[str, str] = {}
    for pid in pids:
        folder = proc / str(pid)
        with contextlib.suppress(OSError):
            text = (folder / "maps").read_text(errors="surrogateescape")
            paths |= loaded.mapped(text)
            written |= loaded.mapped("\n".join(line for line in text.splitlines() if " rw-s " in line[:60]))
            commands.append((folder / "cmdline").read_text(errors="replace").split("\0"))
            if not environment or "HOME" not in environment:
                environment = _environment(folder)
            for path, writable in _open_files(folder):
                paths.add(path)
                if writable:
                    written.add(path)
    # Names that are no text could not be written down as such; nothing that is loaded has one.
    whole = sorted(path for path in paths if path.isprintable())
    return Seen(
        paths=tuple(whole),
        written=tuple(sorted(written & set(whole))),
        model=model.find(commands, environment, whole, label=label),
    )


def _open_files(folder: Path) -> Iterable[tuple[str, bool]]:
    for link in (folder / "fd").iterdir():
        try:
            target = str(link.readlink())
            if not loaded.is_file(target):
                continue
            flags = (folder / "fdinfo" / link.name).read_text().split("flags:", 1)[1].split(None, 1)[0]
            if not link.is_file():  # a folder, a FIFO, a device
                continue
        except (OSError, IndexError):
            continue
        yield target, int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _environment(folder: Path) -> dict[str, str]:
    """Only what tells where models lie: the rest may be secret."""
    wanted = ("HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "MOORAGE_MODEL")
    pairs = (item.partition("=") for item in (folder / "environ").read_text(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name in wanted}


def build(pod: Pod, seen: Seen) -> JobFingerprint:
    """The pod's fingerprint. Blocks for as long as it takes to read the files whose digests are not known."""
    node, spec = pod.node.fingerprint, pod.spec
    mounts = tuple(
        MountMark(source=mount.source, destination=mount.destination, read_only=mount.read_only)
        for mount in spec.mounts
    )
    layers = pod.layers.mountpoints
    with NodeFiles(spec.image, layers, mounts) as files:
        look = _Look(pod, files, pod.node.digests)
        hits = {
            "engine": loaded.engine(seen.paths),
            "torch": loaded.torch(seen.paths),
            "cuda": loaded.library("cuda", seen.paths),
            "nccl": loaded.library("nccl", seen.paths),
        }
        packages = {rule: look.package(hit) for rule, hit in hits.items() if hit is not None}
        found = JobFingerprint(
            node=node,
            gpus=_used(node.gpus, pod.record.gpus, spec.gpus_per_pod),
            **packages,
            model=look.model(seen.model) if seen.model else None,
            image=spec.image,
            layers=layers,
            mounts=mounts,
            files=look.marks(seen.paths, frozenset(seen.written)),
        )
    with contextlib.suppress(OSError):
        pod.node.digests.save()
    return found


def _used(gpus: Sequence[Gpu], uuids: Sequence[str], count: int) -> tuple[Gpu, ...]:
    """The GPUs that a pod has, of all of its node."""
    bare = {uuid.removeprefix("GPU-") for uuid in uuids}
    return tuple(gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-") in bare) or tuple(gpus[:count])


class _Look:
    def __init__(self, pod: Pod, files: NodeFiles, digests: Digests) -> None:
        self._pod = pod
        self._files = files
        self._digests = digests

    def _carried(self, path: str) -> Path | None:
        return None if self._files.live(path) else self._pod.layers.carried(path)

    def mark(self, path: str) -> FileMark | None:
        """A file of the node; None for one that the checkpoint carries, or that is not there."""
        live = self._files.live(path)
        if self._carried(path) is not None or (fd := self._files.open(path)) is None:
            return None
        try:
            size, digest = self._digests.of(fd, sampled=live)
        except OSError:
            return None
        finally:
            os.close(fd)
        return FileMark(path=path, size=size, digest=digest, live=live)

    def marks(self, paths: Sequence[str], written: frozenset[str]) -> tuple[FileMark, ...]:
        """All files; what is written to on a live mount changes while the job is away, and is left out."""
        steady = (path for path in paths if not (path in written and self._files.live(path)))
        return tuple(mark for path in steady if (mark := self.mark(path)) is not None)

    def package(self, hit: loaded.Hit) -> Package:
        """A loaded package with the version that its metadata says."""
        carried = self._carried(hit.library)
        version = hit.version
        if not version and hit.folder:
            own = self._carried(hit.folder)
            names = list(self._files.entries(hit.folder))
            with contextlib.suppress(OSError):
                names += [entry.name for entry in own.iterdir()] if own else []
            version = loaded.version_in(hit.package, names)
        return Package(name=hit.name, version=version, folder=hit.folder, carried=carried is not None)

    def model(self, named: model.Named) -> ModelMark:
        """The model with the files that say what is in it."""
        revision, index = named.revision, []
        for folder in named.folders:
            if folder.endswith("/snapshots/"):
                revisions = self._files.entries(folder)
                revision = revisions[0] if len(revisions) == 1 else self._reference(folder, revisions)
                folder = f"{folder}{revision}"
            index += [mark for name in model.INDEX_FILES if (mark := self.mark(f"{folder.rstrip('/')}/{name}"))]
        return ModelMark(name=named.name, revision=revision, index=tuple(index))

    def _reference(self, folder: str, revisions: Sequence[str]) -> str:
        fd = self._files.open(f"{folder.removesuffix('snapshots/')}refs/main")
        if fd is None:
            return ""
        with os.fdopen(fd) as file:
            named = file.read(200).strip()
        return named if named in revisions else ""
