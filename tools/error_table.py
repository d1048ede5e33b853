"""docs/errors.md: every error that moorage raises, with its cure, read from the places in the code that raise it.

A message that is put together at run time shows ``…`` where a name or a number goes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("barrier", "compat", "coordinator", "nccl_quiesce", "store", "worker", "src/moorage")

#: What to do about an error whose place in the code says nothing more.
CURES = {
    "MoorageError": "`moorage events JOB` and the logs of the daemons (docs/operations.md) say what was before it.",
    "UsageError": "Correct the command, the job file or the setting that the message names.",
    "NotFound": "Look for the name with `moorage jobs --all`, `moorage nodes` or `moorage checkpoints`.",
    "Conflict": "Wait until what the message names is over, or choose another name.",
    "Refused": "Take away what the message names, or let it end; the job runs on untouched.",
    "NoCapacity": "Add a node, uncordon one, or let other jobs end; `moorage top` shows who uses what.",
    "EnvironmentLacking": "`moorage doctor` on that machine names everything that is missing, and the way out.",
    "Unavailable": "See that the process or host that the message names runs and can be reached, then try again.",
    "DeadlineExceeded": "Give it more time (`--attempt-deadline`, `--timeout`), or see what was slow in the logs.",
    "CorruptData": "Restore an older checkpoint; `moorage check CHECKPOINT --read-data` says what is damaged.",
    "NewerVersion": "Install the newer moorage on every machine.",
    "Incompatible": "`moorage compat CHECKPOINT NODE` explains it line by line; choose a node that fits.",
    "AttemptAborted": "The job runs on; try again. `moorage events JOB` says what stood in the way.",
    "Forbidden": "Use a certificate whose role allows it, or ask the job's owner.",
    "JobFailed": "`moorage logs JOB` and `moorage events JOB` say why it ended.",
    "DeviceFailed": "See what the driver says of that GPU (`nvidia-smi`, `dmesg`); drain the node if it stays so.",
    "Fenced": "Nothing: a newer coordinator or incarnation has taken over, and this one has stopped in time.",
    "Differs": "The report says where; docs/rehearse.md says how to tell a restore's fault from the job's own.",
}


class Raised(NamedTuple):
    """One message: the class, what it says, and the way out (empty: that of its class)."""

    kind: str
    message: str
    cure: str


class Site(NamedTuple):
    """A place in the code that makes an error of moorage."""

    file: str
    line: int


#: How far an argument is followed back to what gives it.
_DEPTH = 2
#: What stands for an error whose class is known at run time only: it has the code of what stood in its way.
RELAYED = "with the code of its cause"
#: Texts that say by themselves what cannot be saved.
REFUSAL = "Objection"


class _Source:
    """All modules of the code, with what is needed to follow a name to the texts that it may stand for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.trees = {path: ast.parse(path.read_text()) for path in files}
        self._around: dict[ast.AST, ast.AST] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                for child in ast.iter_child_nodes(node):
                    self._around[child] = node
                if isinstance(node, ast.Call):
                    self._calls.setdefault(_name(node.func), []).append(node)

    def _functions(self, node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        while (node := self._around.get(node, node)) in self._around:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def _module(self, node: ast.AST) -> ast.AST:
        while node in self._around:
            node = self._around[node]
        return node

    def texts(self, node: ast.expr | None, depth: int = _DEPTH) -> list[str]:
        """What a string, an f-string, a choice of them or a name may say; ``…`` for what is filled in at run time."""
        match node:
            case None:
                return [""]
            case ast.Constant():
                return [node.value if isinstance(node.value, str) else "…"]
            case ast.JoinedStr():
                return ["".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)]
            case ast.BinOp(op=ast.Add()):
                return [x + y for x in self.texts(node.left, depth) for y in self.texts(node.right, depth)]
            case ast.IfExp():
                return [*self.texts(node.body, depth), *self.texts(node.orelse, depth)]
            case ast.BoolOp(op=ast.Or()):
                return [text for value in node.values for text in self.texts(value, depth)]
            case ast.Name() if depth:
                found = [text for value in self._given(node) for text in self.texts(value, depth - 1)]
                return list(dict.fromkeys(found)) or ["…"]
        return ["…"]

    def _given(self, name: ast.Name) -> Iterator[ast.expr | None]:
        """The expressions that a name stands for: what is assigned to it, or handed over as that argument."""
        for function in self._functions(name):
            assigned = [*_assigned(function, name.id)]
            if assigned:
                yield from assigned
                return
            parameters = [*function.args.posonlyargs, *function.args.args]
            names = [one.arg for one in (*parameters, *function.args.kwonlyargs)]
            if name.id in names:
                at = names.index(name.id) - (names[:1] in (["self"], ["cls"]))
                for call in self._calls.get(function.name, []):
                    if len(call.args) > at and not any(isinstance(one, ast.Starred) for one in call.args):
                        yield call.args[at]
                    yield from (word.value for word in call.keywords if word.arg == name.id)
                return
        yield from _assigned(self._module(name), name.id)

    def made(self, kinds: set[str]) -> Iterator[tuple[Site, ast.Call, str]]:
        """Every place that makes an error: its class, or `RELAYED`."""
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (kind := _kind(node, kinds)):
                    yield Site(str(path.relative_to(ROOT)), node.lineno), node, kind


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _assigned(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    body = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                    yield from (value for one, value in pairs if isinstance(one, ast.Name) and one.id == name)
        elif (
            isinstance(node, ast.AnnAssign | ast.NamedExpr)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
            and node.value is not None
        ):
            yield node.value


def _kind(call: ast.Call, kinds: set[str]) -> str:
    name = _name(call.func)
    if name in kinds and call.args:
        return name
    if name == REFUSAL and len(call.args) >= 2:
        return REFUSAL
    by_name = isinstance(call.func, ast.Call) and _name(call.func.func) in ("by_name", "type")
    return RELAYED if (by_name or name == "kind") and len(call.args) == 2 else ""


def _rows(source: _Source, call: ast.Call, kind: str) -> Iterator[Raised]:
    given = dict(enumerate(call.args)) | {word.arg: word.value for word in call.keywords}
    if kind == REFUSAL:
        fields = enumerate(("what", "why", "cure"))
        what, why, cure = (source.texts(given.get(at, given.get(key))) for at, key in fields)
        messages, cures = [f"{x}: {y}" for x in what for y in why], cure
    else:
        messages, cures = source.texts(call.args[0]), source.texts(given.get(1, given.get("hint")))
    way_out = " / ".join(dict.fromkeys(" ".join(text.split()) for text in cures if text.strip("… ")))
    for message in messages:
        yield Raised(kind, " ".join(message.split()), way_out)


def _everything() -> tuple[_Source, set[str]]:
    from moorage.errors import exit_codes

    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "errors.py"]
    return _Source(files), {name for _, name, _ in exit_codes()}


@functools.cache
def sites() -> dict[Site, list[Raised]]:
    """What is said at each place of the code that makes an error."""
    source, kinds = _everything()
    found: dict[Site, list[Raised]] = {}
    for site, call, kind in source.made(kinds):
        found.setdefault(site, []).extend(_rows(source, call, kind))
    return found


def raised() -> list[Raised]:
    """All messages, each once, by class and text. The same text with several ways out: the first that has one."""
    found: dict[tuple[str, ...], Raised] = {}
    for rows in sites().values():
        for one in rows:
            bare = not one.message.strip("…:;, ")  # says nothing by itself: its cures are told apart
            key = (*one[:2], one.cure if bare else "")
            if key not in found or not found[key].cure:
                found[key] = one
    return sorted(found.values())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _table(rows: list[Raised]) -> list[str]:
    if not rows:
        return []
    head = ["", "| message | cure |", "|---|---|"]
    return head + [f"| {_cell(one.message)} | {_cell(one.cure) or 'see above'} |" for one in rows]


def page() -> str:
    """docs/errors.md"""
    from moorage.errors import exit_codes

    lines = [
        "# Errors and their cures",
        "",
        "Every error is one line that names the thing, a second one with the way out, and an exit code. Below is what",
        "moorage says, by kind; `…` stands for a name or a number. Where the message has no second line, the cure of",
        "its kind holds. Codes: [exit-codes.md](exit-codes.md). This page is written by `tools/docs.py` from the code.",
    ]
    everything = raised()
    for code, name, meaning in exit_codes():
        lines += [
            "",
            f"## {name} ({code})",
            "",
            meaning.replace("``", "`"),
            "",
            f"**Cure:** {CURES.get(name, CURES['MoorageError'])}",
        ]
        lines += _table([one for one in everything if one.kind == name])
        if name == "Refused":
            lines += ["", "What in a pod cannot be saved, as the refusal names it:"]
            lines += _table([one for one in everything if one.kind == REFUSAL])
    lines += ["", f"## {RELAYED.capitalize()}", "", "These have the class, and the code, of what stood in their way."]
    lines += _table([one for one in everything if one.kind == RELAYED])
    return "\n".join(lines) + "\n"
