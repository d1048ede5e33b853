"""Write the proxy's generated sources: `generate.py --header cuda.h --compiler c++ --classes classes.txt --out DIR`.

One list of functions, read from the header, is the source of everything: the forwarding functions, the table of the
driver's addresses, the table for cuGetProcAddress and the list of exported symbols.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

# A build may run this with PYTHONSAFEPATH set, which leaves the script's own folder out of the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from header import Function, HeaderError, Version, functions, preprocess, untyped, versions

#: Not of the driver's interface: how a libnccl proxy of the same process finds this one.
PRIVATE = ("moorage_graphs", "moorage_tell_stream_ends", "moorage_captures_running")
KINDS = ("gated", "wait", "free")
TOP = "// Generated from cuda.h by generate.py: not for editing.\n"


class Plan:
    """What is generated for which function."""

    def __init__(self, header: Path, compiler: str, classes: str) -> None:
        self.functions = functions(preprocess(compiler, header))
        known = {function.name for function in self.functions}
        self.untyped = untyped(header, known)
        self.versions = versions(header, known)
        self.kinds = dict.fromkeys(known, "gated")
        self.hooks: set[str] = set()
        self.changing: set[str] = set()
        for number, line in enumerate(classes.splitlines(), 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            kind, *names = words
            for name in names:
                if name not in known:
                    if kind.endswith("?"):
                        continue
                    raise HeaderError(f"classes, line {number}: the header has no function {name}")
                if kind.rstrip("?") == "hook":
                    self.hooks.add(name)
                elif kind.rstrip("?") == "graph":
                    self.changing.add(name)
                elif kind.rstrip("?") in KINDS:
                    self.kinds[name] = kind.rstrip("?")
                else:
                    raise HeaderError(f"classes, line {number}: no such class: {kind}")

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions] + self.untyped


def signature(function: Function, prefix: str = "") -> str:
    parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(function.types))
    return f"CUresult {prefix}{function.name}({parameters})"


def arguments(function: Function) -> str:
    return ", ".join(f"a{i}" for i in range(len(function.types)))


def functions_h(plan: Plan) -> str:
    listed = "\n".join(f"  {name}," for name in plan.names)
    return f"""{TOP}#pragma once
#include <cstddef>
#include <cstdint>

namespace moorage {{

enum class Fn : std::uint16_t {{
{listed}
}};

enum class Kind : std::uint8_t {{ {", ".join(kind.capitalize() for kind in KINDS)} }};

inline constexpr std::size_t kFunctions = {len(plan.names)};
extern const char* const kNames[kFunctions];
extern const Kind kKinds[kFunctions];

struct Version {{
  const char* base;
  int since;          // 1000 * major + 10 * minor
  bool per_thread;    // answered only when the per-thread default stream was asked for
  Fn function;
}};
inline constexpr std::size_t kVersionCount = {len(plan.versions)};
extern const Version kVersions[kVersionCount];  // by base; within one, ascending

}}  // namespace moorage
"""


def real_h(plan: Plan) -> str:
    calls = "\n".join(
        f"inline {signature(f)} {{\n"
        f"  return reinterpret_cast<CUresult (*)({', '.join(f.types)})>(table[{i}])({arguments(f)});\n}}"
        for i, f in enumerate(plan.functions)
    )
    return f"""{TOP}#pragma once
#include "cuda_api.h"

// The driver's own functions, past hooks and gate.
namespace moorage::real {{

extern "C" void* moorage_real_table[{len(plan.names)}];
inline void** const table = moorage_real_table;

{calls}

}}  // namespace moorage::real
"""


def hooks_h(plan: Plan) -> str:
    declared = "\n".join(signature(f) + ";" for f in plan.functions if f.name in plan.hooks)
    return f"""{TOP}#pragma once
#include "cuda_api.h"

// Functions that the proxy answers itself, or does something around. Called behind the gate.
namespace moorage::hook {{

{declared}

}}  // namespace moorage::hook
"""


def _version(version: Version) -> str:
    per_thread = "true" if version.flavour else "false"
    return f'  {{"{version.base}", {version.since}, {per_thread}, Fn::{version.symbol}}},'


def table_cpp(plan: Plan) -> str:
    kinds = {**plan.kinds, **dict.fromkeys(plan.untyped, "free")}
    ordered = sorted(plan.versions, key=lambda v: (v.base, v.since, v.flavour))
    return f"""{TOP}#include "functions.h"

namespace moorage {{

extern "C" int moorage_absent();
extern "C" void* moorage_real_table[kFunctions];
void* moorage_real_table[kFunctions] = {{
{_lines("  reinterpret_cast<void*>(&moorage_absent)," for _ in plan.names)}
}};

const char* const kNames[kFunctions] = {{
{_lines(f'  "{name}",' for name in plan.names)}
}};

const Kind kKinds[kFunctions] = {{
{_lines(f"  Kind::{kinds[name].capitalize()}," for name in plan.names)}
}};

const Version kVersions[kVersionCount] = {{
{_lines(_version(version) for version in ordered)}
}};

extern "C" {{
{_lines(f"extern char moorage_export_{name}[] __asm__({chr(34)}{name}{chr(34)});" for name in plan.names)}
}}
extern void* const kExports[kFunctions];
void* const kExports[kFunctions] = {{
{_lines(f"  moorage_export_{name}," for name in plan.names)}
}};

}}  // namespace moorage
"""


def forward_cpp(plan: Plan) -> str:
    bodies = []
    for f in plan.functions:
        owner = "hook" if f.name in plan.hooks else "real"
        guard = ""
        if plan.kinds[f.name] != "free":
            guard = f"  const Call call(Fn::{f.name});\n  if (!call.admitted()) return call.refusal();\n"
            if f.name in plan.hooks:
                guard += "  call.from(__builtin_return_address(0));\n"
        given = arguments(f)
        if f.name in plan.changing:
            handle = next(i for kind in ("CUgraph", "CUgraphNode") for i, t in enumerate(f.types) if t == kind)
            guard += f"  graphs::changes(a{handle});\n"
        if owner == "real" and "CUgraphExec" in f.types:
            handle = f.types.index("CUgraphExec")
            guard += f"  const graphs::Using exec(a{handle});\n"
            given = given.replace(f"a{handle}", "exec.real()", 1)
        bodies.append(f"{signature(f)} {{\n{guard}  return {owner}::{f.name}({given});\n}}")
    typed = len(plan.functions)
    jumps = "\n".join(f"MOORAGE_JUMP({name}, {typed + i})" for i, name in enumerate(plan.untyped))
    return f"""{TOP}#include "gate.h"
#include "graphs/graphs.h"
#include "hooks.h"
#include "jump.h"
#include "real.h"

using namespace moorage;

extern "C" {{

{chr(10).join(bodies)}

}}

// Functions of which only the name is known.
{jumps}
"""


def exports_map(plan: Plan, extra: Iterable[str]) -> str:
    names = "\n".join(f"    {name};" for name in sorted({*plan.names, *extra}))
    return f"{{\n  global:\n{names}\n  local: *;\n}};\n"


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Leave a file alone that already says this, so that nothing is compiled again for nothing."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--classes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        plan = Plan(options.header, options.compiler, options.classes.read_text(encoding="utf-8"))
    except HeaderError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "functions.h", functions_h(plan))
    write(options.out / "real.h", real_h(plan))
    write(options.out / "hooks.h", hooks_h(plan))
    write(options.out / "table.cpp", table_cpp(plan))
    write(options.out / "forward.cpp", forward_cpp(plan))
    write(options.out / "exports.map", exports_map(plan, PRIVATE))
    write(options.out / "exports.txt", "\n".join(sorted(plan.names)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
