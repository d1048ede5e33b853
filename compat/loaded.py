"""What a job is made of, from the files that its processes have mapped or open. Pure over paths and texts.

An engine is told by a library that only it brings, because that is what is in memory: what is installed beside it does
not matter. Its version is that of the metadata in the folder from which the library was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_DELETED: Final = " (deleted)"
#: Where each pod has file systems of its own, or the kernel has no files.
_NO_FILES: Final = ("/proc/", "/sys/", "/dev/", "/memfd:", "/SYSV", "/[", "/anon_hugepage")
_INFO: Final = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)\.(?:dist|egg)-info$")


class Sign(NamedTuple):
    """``pattern`` matches the path of a loaded file below a folder of packages; then ``package`` is in use."""

    engine: str
    package: str  # as its metadata folder is called
    pattern: re.Pattern[str]


def _sign(engine: str, package: str, pattern: str) -> Sign:
    return Sign(engine, package, re.compile(rf"^(?P<folder>.*/(?:site|dist)-packages)/{pattern}"))


#: The first that is loaded is the job's engine: servers stand on libraries that are engines of their own.
ENGINES: Final = (
    _sign("vLLM", "vllm", r"vllm/.*\.so"),
    _sign("SGLang", "sglang", r"(?:sgl_kernel|sglang)/.*\.so"),
    _sign("TensorRT-LLM", "tensorrt_llm", r"tensorrt_llm/.*\.so"),
    _sign("JAX", "jax", r"jaxlib/.*\.so"),
    _sign("transformers", "transformers", r"tokenizers/.*\.so"),
    _sign("torch", "torch", r"torch/.*\.so"),
)
_TORCH: Final = _sign("torch", "torch", r"torch/.*\.so")
_NCCL: Final = re.compile(r"/libnccl\.so(?:\.(?P<version>[\d.]+))?$")
_CUDA: Final = re.compile(r"/libcudart(?:-[0-9a-f]+)?\.so(?:\.(?P<version>[\d.]+))?$")
_PACKAGES_OF: Final = {
    "nccl": re.compile(r"^nvidia_nccl_cu\d+$"),
    "cuda": re.compile(r"^nvidia_cuda_runtime(_cu\d+)?$"),
}


class Hit(NamedTuple):
    """A package in use. ``library``: the loaded file; ``folder``: where its metadata lies ("" if in none)."""

    name: str
    package: str
    folder: str
    library: str
    version: str = ""  # by the library's own name, if that says it


def mapped(maps: str) -> set[str]:
    """Paths of the files in the text of a ``/proc/PID/maps``; what is deleted or no file of a disk is left out."""
    found = set()
    for line in maps.splitlines():
        start = line.find("/")
        if start > 0:
            found.add(line[start:])
    return {path for path in found if is_file(path)}


def is_file(path: str) -> bool:
    """Whether a link of ``/proc/PID/fd`` or a mapping's name can be a file of a disk."""
    return path.startswith("/") and not path.endswith(_DELETED) and not path.startswith(_NO_FILES)


def engine(paths: Iterable[str]) -> Hit | None:
    """The job's engine; None for a program that has none of those that are known."""
    found = sorted(paths)
    return next((hit for sign in ENGINES if (hit := _find(sign, found)) is not None), None)


def torch(paths: Iterable[str]) -> Hit | None:
    """PyTorch, if it is loaded, whatever the engine is."""
    return _find(_TORCH, sorted(paths))


def library(rule: str, paths: Iterable[str]) -> Hit | None:
    """``nccl`` or ``cuda`` (its runtime), if loaded."""
    pattern = _NCCL if rule == "nccl" else _CUDA
    for path in sorted(paths):
        if match := pattern.search(path):
            folder = re.match(r"^.*/(?:site|dist)-packages(?=/)", path)
            named = match["version"] or ""
            name = "NCCL" if rule == "nccl" else "CUDA runtime"
            return Hit(name, rule, folder[0] if folder else "", path, named if named.count(".") else "")
    return None


def _find(sign: Sign, paths: Sequence[str]) -> Hit | None:
    for path in paths:
        if match := sign.pattern.match(path):
            return Hit(sign.engine, sign.package, match["folder"], path)
    return None


def version_in(package: str, entries: Iterable[str]) -> str:
    """The version of a package by the names of the metadata folders among ``entries``; empty if there is none.

    ``package`` is the name of the package, or ``nccl`` and ``cuda`` for the wheels of these libraries.
    """
    wanted = _PACKAGES_OF.get(package)
    for entry in sorted(entries):
        if match := _INFO.match(entry):
            name = re.sub(r"[-_.]+", "_", match["name"]).lower()
            if wanted.match(name) if wanted else name == package:
                return match["version"]
    return ""


_LIBC: Final = re.compile(r"/(?:libc\.so\.\d+|libc-[\d.]+\.so|ld-linux[^/]*\.so\.\d+|ld-[\d.]+\.so|[^/]*ld-musl[^/]*)$")


def is_libc(path: str) -> bool:
    """Whether this file is a C library or its loader."""
    return _LIBC.search(path) is not None
