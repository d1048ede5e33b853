"""The list of NCCL's functions (functions.txt): write it from NCCL's headers, or check it against headers and library.

    declare.py --include .../nvidia/nccl/include [--library .../libnccl.so.2] [--write]

NCCL only comes in wheels of 200 MB, so the list is a file of this project and a build needs no NCCL. Types are reduced
to what the calling convention sees: pointers, integers, and the few structures that are passed by value.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

LIST = Path(__file__).resolve().parent / "functions.txt"
VALUES = {
    "ncclUniqueId": "UniqueId",
    "ncclTeam_t": "Team",
    "ncclTeam": "Team",
    "ncclMultimemHandle_t": "Multimem",
    "size_t": "std::size_t",
    "uint64_t": "std::uint64_t",
    "int": "int",
    "unsigned int": "unsigned",
    "void": "void",
}
HANDLES = ("ncclComm_t", "ncclWindow_t", "cudaStream_t", "ncclParamHandle_t")
ENUMERATIONS = re.compile(r"nccl(Result|DataType|RedOp|ScalarResidence|CommMemStat|CftTeamMode)_t")
#: Exported, and in no header: NCCL's own business, kept so that whoever is linked against it can be loaded.
UNDECLARED = {"ncclResetDebugInitInternal": "void()"}


class UnknownType(Exception):
    """A type of the header that this script has no rule for."""


def reduced(declared: str) -> str:
    """The type as the calling convention sees it."""
    text = " ".join(re.sub(r"\b(const|struct)\b", " ", declared).split())
    if "*" in text or "[" in text or text in HANDLES:
        return "void*"
    if ENUMERATIONS.fullmatch(text):
        return "int"
    if text not in VALUES:
        raise UnknownType(text)
    return VALUES[text]


def parameter(text: str) -> str:
    """The reduced type of one declared parameter, which may have a name."""
    text = text.strip()
    if "*" in text:
        return "void*"
    words = [word for word in text.split() if word not in ("const", "struct")]
    for count in (len(words), len(words) - 1):
        try:
            return reduced(" ".join(words[:count]))
        except UnknownType:
            continue
    raise UnknownType(text)


def declared(include: Path) -> dict[str, str]:
    """All functions of the headers with their reduced signatures, without the ``p`` variants."""
    found: dict[str, str] = {}
    files = [include / "nccl.h", *sorted((include / "nccl_device").glob("*.h"))]
    form = r"\b(ncclResult_t|const char\s*\*|void|int|ncclTeam_t|ncclTeam)\s+(nccl\w+)\s*\(([^;{}()]*)\)\s*;"
    for path in files:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
        text = re.sub(r"^\s*#.*$", " ", text, flags=re.MULTILINE)
        for answer, name, parameters in re.findall(form, text):
            parts = [part for part in parameters.split(",") if part.strip() not in ("", "void")]
            try:
                found[name] = f"{reduced(answer)}({', '.join(parameter(part) for part in parts)})"
            except UnknownType:
                if path.name == "nccl.h":
                    raise  # in the others it is code for the device
    return found


def exported(library: Path) -> set[str]:
    """The nccl and pnccl symbols of a library."""
    command = ["nm", "-D", "--defined-only", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1] for line in lines if re.fullmatch(r"p?nccl\w+", line.split()[-1])}


def listed() -> dict[str, str]:
    """What functions.txt says."""
    lines = (line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {name: signature for name, _, signature in (line.partition(" ") for line in lines)}


def main() -> int:
    """0: the list fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = declared(arguments.include)
    symbols: set[str] = set()
    if arguments.library is not None:
        symbols = exported(arguments.library)
        found = {name: signature for name, signature in found.items() if name in symbols}
    found |= UNDECLARED
    if arguments.write:
        text = (arguments.include / "nccl.h").read_text(encoding="utf-8")
        version = ".".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", text))
        lines = [f"# NCCL {version}, by declare.py: not for editing.", *(f"{n} {s}" for n, s in sorted(found.items()))]
        LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    known = listed()
    wrong = [
        f"{name}: {found[name]}, listed {known.get(name)}" for name in sorted(found) if found[name] != known.get(name)
    ]
    names = known.keys() | {f"p{name}" for name in known}
    wrong += [f"{name}: exported, not listed" for name in sorted(symbols - names)]
    print("\n".join(wrong) or f"{len(known)} functions, all as the header declares them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
