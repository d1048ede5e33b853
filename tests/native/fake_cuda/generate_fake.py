"""Write the part of the fake driver that cuda.h decides: a stub for every function that the driver of its age has.

A function that fake_cuda/*.cpp defines replaces its stub, which is weak. A variant for the per-thread default stream
calls the plain function with that stream.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "native" / "intercept"))

from header import Function, functions, preprocess, untyped, versions  # type: ignore[import-not-found]  # beside it

AGE = 13000  # the CUDA version of the fake driver: what came later it does not have


def stub(function: Function, known: set[str]) -> str:
    parameters = ", ".join(f"[[maybe_unused]] {kind} a{i}" for i, kind in enumerate(function.types))
    head = f'EXPORT WEAK CUresult {function.name}({parameters}) {{\n  fake::note("{function.name}");\n'
    plain = function.name.removesuffix("_ptds").removesuffix("_ptsz")
    if plain == function.name or plain not in known:
        return head + "  return CUDA_ERROR_NOT_SUPPORTED;\n}"
    arguments = ", ".join(
        f"fake::per_thread(a{i})" if kind == "CUstream" else f"a{i}" for i, kind in enumerate(function.types)
    )
    return head + f"  const fake::AsPerThread scope;\n  return {plain}({arguments});\n}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    declared = functions(preprocess(options.compiler, options.header))
    names = {function.name for function in declared}
    listed = versions(options.header, names)
    newer = {version.symbol for version in listed if version.since > AGE}
    declared = [function for function in declared if function.name not in newer]
    stubs = "\n".join(stub(function, names - newer) for function in declared)
    jumps = "\n".join(
        f'EXPORT WEAK int {name}() {{\n  fake::note("{name}");\n  return CUDA_ERROR_NOT_SUPPORTED;\n}}'
        for name in untyped(options.header, names)
        if "EGL" not in name
    )
    rows = "\n".join(
        f'  {{"{v.base}", {v.since}, {"true" if v.flavour else "false"}, reinterpret_cast<void*>(&{v.symbol})}},'
        for v in listed
        if v.symbol not in newer
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stubs.cpp").write_text(
        '#include "fake.h"\n#define EXPORT extern "C" __attribute__((visibility("default")))\n'
        f"#define WEAK __attribute__((weak))\n\n{stubs}\n{jumps}\n\nnamespace fake {{\n"
        f"const Row kRows[] = {{\n{rows}\n}};\nconst std::size_t kRowCount = sizeof kRows / sizeof *kRows;\n}}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
