"""The table of rules, and the verdict that follows from it. Pure.

The rule of four (GPU model, driver, engine, model) is about what the job computes with; the technical rules are about
what CRIU, runc and the kernel need to make the processes anew. What is not known on one side is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from moorage.compat import features
from moorage.compat.fingerprint import FileMark, Found, Gpu, JobFingerprint, NodeFingerprint
from moorage.compat.loaded import is_libc

Group = Literal["four", "technical"]
State = Literal["ok", "differs", "unused", "not compared"]


class Rule(msgspec.Struct, frozen=True):
    """``demand``: what must hold, as a sentence; ``reason``: why; ``cure``: the way out of a mismatch."""

    name: str
    group: Group
    demand: str
    reason: str
    cure: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a verdict. ``message`` names the thing that differs."""

    rule: str
    state: State
    wanted: str = ""
    found: str = ""
    message: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """All lines of one pod on one node, in the table's order."""

    lines: tuple[Line, ...]

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def misfits(self) -> tuple[Line, ...]:
        """The lines that forbid the restore."""
        return tuple(line for line in self.lines if line.state == "differs")

    @property
    def summary(self) -> str:
        """All mismatches in one line; long lists of files are cut."""
        told = [line.message for line in self.misfits]
        more = len(told) - _MOST_TOLD
        return "; ".join(told[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


_MOST_TOLD: Final = 6
_ELSEWHERE: Final = "restore it on a node that has the same"

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "gpu", "four", "The node has as many GPUs of the same model and memory as the pod used.",
        "Kernels are compiled for one model, and device memory goes back to the same addresses.", _ELSEWHERE,
    ),
    Rule(
        "driver", "four", "The GPU driver has the same version.",
        "The driver restores its own saved state, and reads only what the same version wrote.", _ELSEWHERE,
    ),
    Rule(
        "engine", "four", "The engine that is loaded is installed in the same version.",
        "What it loads later must fit to what is in memory already.", "install the same version there",
    ),
    Rule(
        "model", "four", "The model has the same revision and index files.",
        "Weights that are read later must be those that the job began with.", "bring the same revision there",
    ),
    Rule(
        "architecture", "technical", "The processor has the same architecture.",
        "Memory holds machine code and registers.", _ELSEWHERE,
    ),
    Rule(
        "cpu", "technical", "The processor can do all that the checkpoint's could.",
        "Libraries choose their code by what the processor could do when they were loaded; the first instruction that "
        "is missing ends the process.", "restore it on such a processor, or start jobs on the poorest one",
    ),
    Rule(
        "kernel", "technical", "The kernel is not older (first two numbers).",
        "Processes hold descriptors, options and flags that an older kernel does not know.", "upgrade its kernel",
    ),
    Rule(
        "criu", "technical", "CRIU is not older (first two numbers).",
        "An older one does not know all that the images hold.", "run `moorage runtime install` there",
    ),
    Rule(
        "runc", "technical", "runc is not older (first two numbers).",
        "It reads what the other one wrote beside the images.", "run `moorage runtime install` there",
    ),
    Rule(
        "libc", "technical", "The C library is the same, byte for byte.",
        "It is mapped into every process, and its code and data are in memory at fixed places.",
        "use the same distribution and updates, or --image",
    ),
    Rule(
        "cuda", "technical", "The CUDA runtime has the same version, and the driver serves it.",
        "It is in memory, and shares tables with the driver.", "install the same version there",
    ),
    Rule(
        "torch", "technical", "PyTorch has the same version.",
        "Modules that are imported after the restore must fit to the libraries in memory.",
        "install the same version there",
    ),
    Rule(
        "nccl", "technical", "NCCL has the same version.",
        "All ranks of a communicator must speak the same protocol.", "install the same version there",
    ),
    Rule(
        "image", "technical", "The image is there.", "It is the pod's root file system.", "bring the image there",
    ),
    Rule(
        "mounts", "technical", "The source of every live mount is there.",
        "Live mounts are not saved: the node must have them.", "mount the same folder there",
    ),
    Rule(
        "files", "technical", "Every file that was mapped or open outside the pod's own files has the same content.",
        "CRIU maps the file of the node where the checkpoint's was; one other byte is other code or data.",
        "bring the same file there, or use --image",
    ),
)  # fmt: skip
BY_NAME: Final = {rule.name: rule for rule in RULES}


def judge(job: JobFingerprint, node: NodeFingerprint, found: Found | None = None) -> Verdict:
    """Whether a checkpoint of a pod with this fingerprint can be restored on the node.

    ``found``: what the node has of the job's files; without it only what is known of the node is judged.
    """
    return Verdict(tuple(line for rule in RULES for line in _CHECKS[rule.name](job, node, found)))


Check = Callable[[JobFingerprint, NodeFingerprint, Found | None], Iterator[Line]]


def _equal(rule: str, what: str, wanted: str, found: str) -> Line:
    if not wanted or not found:
        return Line(rule=rule, state="not compared", wanted=wanted, found=found)
    if wanted == found:
        return Line(rule=rule, state="ok", wanted=wanted, found=found)
    return Line(
        rule=rule, state="differs", wanted=wanted, found=found, message=f"{what} is {found} there, and was {wanted}"
    )


def _gpu(job: JobFingerprint, node: NodeFingerprint, _: Found | None) -> Iterator[Line]:
    if not job.gpus:
        yield Line(rule="gpu", state="unused")
        return
    wanted = _gpus(job.gpus)
    found = _gpus(node.gpus) or "none"
    kinds = dict.fromkeys((gpu.model, gpu.memory_bytes) for gpu in job.gpus)
    for model, memory in kinds:
        needs = sum((gpu.model, gpu.memory_bytes) == (model, memory) for gpu in job.gpus)
        has = sum(gpu.model == model and memory in (0, gpu.memory_bytes) for gpu in node.gpus)
        if has < needs:
            message = f"the pod used {wanted}, the node has {found}"
            yield Line(rule="gpu", state="differs", wanted=wanted, found=found, message=message)
            return
    yield Line(rule="gpu", state="ok", wanted=wanted, found=found)


def _gpus(gpus: tuple[Gpu, ...]) -> str:
    names = [gpu.model + (f" {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else "") for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _driver(job: JobFingerprint, node: NodeFingerprint, _: Found | None) -> Iterator[Line]:
    if not job.gpus:
        yield Line(rule="driver", state="unused")
        return
    yield _equal("driver", "the GPU driver", job.node.driver, node.driver or "none")


def _package(rule: str) -> Check:
    def check(job: JobFingerprint, node: NodeFingerprint, found: Found | None) -> Iterator[Line]:
        package = job.packages.get(rule)
        if package is None:
            yield Line(rule=rule, state="unused")
            return
        wanted = f"{package.name} {package.version}".strip()
        if package.carried or found is None or not package.version or not package.folder:
            # Its files are compared one by one (rule `files`), or they are part of the checkpoint.
            state: State = "ok" if package.carried else "not compared"
            yield Line(rule=rule, state=state, wanted=wanted)
            return
        has = found.packages.get(rule, "")
        yield _equal(rule, package.name, wanted, f"{package.name} {has}" if has else "not installed")

    return check


def _cuda(job: JobFingerprint, node: NodeFingerprint, found: Found | None) -> Iterator[Line]:
    yield from _package("cuda")(job, node, found)
    if job.gpus and job.cuda and _numbers(job.cuda.version) and _numbers(node.cuda) < _numbers(job.cuda.version)[:1]:
        message = f"the driver there serves CUDA {node.cuda or 'none'}, the pod uses {job.cuda.version}"
        yield Line(rule="cuda", state="differs", wanted=job.cuda.version, found=node.cuda, message=message)


def _model(job: JobFingerprint, _: NodeFingerprint, found: Found | None) -> Iterator[Line]:
    model = job.model
    if model is None:
        yield Line(rule="model", state="unused")
        return
    wanted = f"{model.name}@{model.revision}" if model.revision else model.name
    if found is None or not model.index:
        yield Line(rule="model", state="not compared", wanted=wanted)
        return
    bad = [line for mark in model.index if (line := _file("model", mark, found)) is not None]
    for line in bad:
        yield msgspec.structs.replace(line, message=f"model {wanted}: {line.message}")
    if not bad:
        yield Line(rule="model", state="ok", wanted=wanted, found=wanted)


def _architecture(job: JobFingerprint, node: NodeFingerprint, _: Found | None) -> Iterator[Line]:
    yield _equal("architecture", "the architecture", job.node.architecture, node.architecture)


def _cpu(job: JobFingerprint, node: NodeFingerprint, _: Found | None) -> Iterator[Line]:
    had, has = job.node.cpu_features, node.cpu_features
    if not had or not has:
        yield Line(rule="cpu", state="not compared", wanted=job.node.cpu, found=node.cpu)
        return
    missing = features.lacking(had, has)
    if missing:
        message = f"the processor there ({node.cpu or 'unknown'}) lacks {', '.join(missing)}"
        wanted = f"{job.node.cpu} with {' '.join(missing)}"
        yield Line(rule="cpu", state="differs", wanted=wanted, found=node.cpu, message=message)
    else:
        yield Line(rule="cpu", state="ok", wanted=job.node.cpu, found=node.cpu)


def _not_older(rule: str, what: str, of: Callable[[NodeFingerprint], str]) -> Check:
    def check(job: JobFingerprint, node: NodeFingerprint, _: Found | None) -> Iterator[Line]:
        wanted, found = of(job.node), of(node)
        if not _numbers(wanted) or not _numbers(found):
            yield Line(rule=rule, state="not compared", wanted=wanted, found=found)
        elif _numbers(found)[:2] < _numbers(wanted)[:2]:
            message = f"{what} is {found} there, older than {wanted}"
            yield Line(rule=rule, state="differs", wanted=wanted, found=found, message=message)
        else:
            yield Line(rule=rule, state="ok", wanted=wanted, found=found)

    return check


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _libc(job: JobFingerprint, node: NodeFingerprint, found: Found | None) -> Iterator[Line]:
    own = not job.image  # the pod's C library is the node's
    marks = [mark for mark in job.files if is_libc(mark.path)]
    bad = [line for mark in marks if found is not None and (line := _file("libc", mark, found)) is not None]
    yield from bad
    if not bad and own and (job.node.libc != node.libc or found is None):
        yield _equal("libc", "the C library", job.node.libc, node.libc)
    elif not bad:
        state: State = "ok" if found is not None and marks else "not compared"
        yield Line(rule="libc", state=state, wanted=job.node.libc if own else job.image)


def _image(job: JobFingerprint, _: NodeFingerprint, found: Found | None) -> Iterator[Line]:
    if not job.image:
        yield Line(rule="image", state="unused")
    elif found is None:
        yield Line(rule="image", state="not compared", wanted=job.image)
    elif not found.image:
        message = f"the image {job.image} is not there"
        yield Line(rule="image", state="differs", wanted=job.image, found="none", message=message)
    else:
        yield Line(rule="image", state="ok", wanted=job.image, found=job.image)


def _mounts(job: JobFingerprint, _: NodeFingerprint, found: Found | None) -> Iterator[Line]:
    if not job.mounts:
        yield Line(rule="mounts", state="unused")
        return
    for mount in job.mounts:
        name = f"{mount.source}:{mount.destination}"
        if found is None:
            yield Line(rule="mounts", state="not compared", wanted=name)
        elif mount.source in found.sources:
            yield Line(rule="mounts", state="ok", wanted=name, found=name)
        else:
            message = f"{mount.source}, which the pod sees as {mount.destination}, is not there"
            yield Line(rule="mounts", state="differs", wanted=name, found="none", message=message)


def _files(job: JobFingerprint, _: NodeFingerprint, found: Found | None) -> Iterator[Line]:
    marks = [mark for mark in job.files if not is_libc(mark.path)]
    if not marks:
        yield Line(rule="files", state="unused")
        return
    count = f"{len(marks)} files"
    if found is None:
        yield Line(rule="files", state="not compared", wanted=count)
        return
    bad = [line for mark in marks if (line := _file("files", mark, found)) is not None]
    yield from bad
    if not bad:
        yield Line(rule="files", state="ok", wanted=count, found=count)


def _file(rule: str, mark: FileMark, found: Found) -> Line | None:
    seen = found.files.get(mark.path)
    if seen is None:
        has, message = "none", f"{mark.path} is not there"
    elif seen.size != mark.size:
        has = f"{seen.size} bytes"
        message = f"{mark.path} has {seen.size} bytes there, and had {mark.size}"
    elif seen.digest != mark.digest:
        has = seen.digest[:16]
        message = f"{mark.path} has other content there (BLAKE3 {has}…, and was {mark.digest[:16]}…)"
    else:
        return None
    wanted = f"{mark.path}: {mark.size} bytes, {mark.digest[:16]}"
    return Line(rule=rule, state="differs", wanted=wanted, found=has, message=message)


_CHECKS: Final[dict[str, Check]] = {
    "gpu": _gpu,
    "driver": _driver,
    "engine": _package("engine"),
    "model": _model,
    "architecture": _architecture,
    "cpu": _cpu,
    "kernel": _not_older("kernel", "the kernel", lambda node: node.kernel),
    "criu": _not_older("criu", "CRIU", lambda node: node.criu),
    "runc": _not_older("runc", "runc", lambda node: node.runc),
    "libc": _libc,
    "cuda": _cuda,
    "torch": _package("torch"),
    "nccl": _package("nccl"),
    "image": _image,
    "mounts": _mounts,
    "files": _files,
}


def table() -> str:
    """The rules as a table in Markdown."""
    titles = {"four": "rule of four", "technical": "technical"}
    rows = [f"| {rule.name} | {titles[rule.group]} | {rule.demand} | {rule.reason} | {rule.cure} |" for rule in RULES]
    return "\n".join(["| rule | kind | what must hold | why | the way out |", "|---|---|---|---|---|", *rows]) + "\n"
