"""What cuda.h declares: every function the driver exports, its parameters, and when each version of it came.

The header is preprocessed with the switch NVIDIA itself builds the driver with, which brings out all versioned names
(`_v2`, `_v3`) and the variants for the per-thread default stream (`_ptds`, `_ptsz`).
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

VERSIONED = "__CUDA_API_VERSION_INTERNAL"
STREAM_FLAVOURS = ("", "_ptds", "_ptsz")
# Headers beside cuda.h whose functions need other projects' headers to compile: only their names are taken.
NEIGHBOURS = ("cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
# cudaProfiler.h is in another package; its three functions have not changed since CUDA 4.
PROFILER = ("cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop")


class HeaderError(Exception):
    """The header does not look as expected: the message says what is missing."""


@dataclass(frozen=True)
class Function:
    """One exported function. `types[i]` is the declared type of parameter i, without its name."""

    name: str
    types: tuple[str, ...]


@dataclass(frozen=True)
class Version:
    """`cuGetProcAddress(base, v >= since)` answers `symbol`; `flavour` is one of STREAM_FLAVOURS."""

    base: str
    since: int
    flavour: str
    symbol: str


def preprocess(compiler: str, header: Path) -> str:
    command = [compiler, "-E", "-P", "-x", "c++", f"-D{VERSIONED}", "-I", str(header.parent), str(header)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise HeaderError(f"{header}: the compiler cannot read it:\n{done.stderr}")
    return done.stdout


def functions(preprocessed: str) -> list[Function]:
    """All functions in the order of their declaration. Raises HeaderError when a declaration is not understood."""
    found: dict[str, Function] = {}
    for name, parameters in re.findall(r"\bCUresult\s+(cu\w+)\s*\(([^;{}]*)\)\s*;", preprocessed):
        function = Function(name, _types(name, parameters))
        if found.setdefault(name, function) != function:
            raise HeaderError(f"{name} is declared twice, with different parameters")
    for needed in ("cuInit", "cuGetProcAddress_v2", "cuMemAlloc_v2", "cuStreamSynchronize_ptsz"):
        if needed not in found:
            raise HeaderError(f"no declaration of {needed} was found")
    return list(found.values())


def _types(name: str, parameters: str) -> tuple[str, ...]:
    text = " ".join(parameters.split())
    if text in ("", "void"):
        return ()
    types = []
    for parameter in text.split(","):
        match = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*(\[\w*\])?\s*", parameter)
        if match is None or "(" in parameter:
            raise HeaderError(f"{name}: parameter {parameter!r} is not understood")
        types.append(match.group(1).strip() + (" *" if match.group(3) else ""))
    return tuple(types)


def untyped(header: Path, known: set[str]) -> list[str]:
    """Functions of the neighbouring headers: names only."""
    names = set(PROFILER)
    for neighbour in NEIGHBOURS:
        path = header.parent / neighbour
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            declared = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", text))
            for alias, target in re.findall(r"^#\s*define\s+(cu\w+)\s+(cu\w+)\s*$", text, re.MULTILINE):
                declared |= {alias, target} if alias in declared else set()
            for alias, target in re.findall(
                r"^#\s*define\s+(cu\w+)\s+__CUDA_API_PT\w\w\((cu\w+)\)", text, re.MULTILINE
            ):
                declared |= {alias, target, target + "_ptds", target + "_ptsz"} if alias in declared else set()
            names |= declared
    return sorted(names - known)


def versions(header: Path, known: set[str]) -> list[Version]:
    """From which CUDA version on cuGetProcAddress answers a base name with which symbol.

    cudaTypedefs.h lists the versions of a base name, cuda.h its symbols, both oldest first: the n-th belongs to the
    n-th. A base name whose lists have different lengths is left out, so that nothing is ever guessed.
    """
    typedefs = (header.parent / "cudaTypedefs.h").read_text(encoding="utf-8")
    renamed = dict(re.findall(r"^#define\s+(cu\w+)\s+(cu\w+)\s*$", header.read_text(encoding="utf-8"), re.MULTILINE))
    listed: dict[tuple[str, str], set[int]] = {}
    for base, since, flavour in re.findall(r"\*PFN_(cu\w+?)_v(\d{4,5})(_ptds|_ptsz)?\)", typedefs):
        listed.setdefault((base, flavour), set()).add(int(since))
    result = []
    for (base, flavour), numbers in sorted(listed.items()):
        symbols = [base + suffix + flavour for suffix in ("", "_v2", "_v3", "_v4", "_v5", "_v6")]
        symbols = [symbol for symbol in symbols if symbol in known]
        target = renamed.get(base, base) + flavour
        if target in known and target not in symbols:
            symbols.append(target)
        if len(symbols) == len(numbers):
            result += [Version(base, s, flavour, symbol) for s, symbol in zip(sorted(numbers), symbols, strict=True)]
    return result
