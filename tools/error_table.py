"""docs/errors.md: every error that moorage raises, with its cure, read from the places in the code that raise it.

A message that is put together at run time shows ``…`` where a name or a number goes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    """One place: the class, what it says, and the way out (empty: that of its class)."""

    kind: str
    message: str
    cure: str


def _text(node: ast.expr | None) -> str:
    """The text of a string or of an f-string; ``…`` for what is filled in."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or "…") + (_text(node.right) or "…")
    if isinstance(node, ast.IfExp):
        return _text(node.body) or _text(node.orelse)
    return ""


def _calls(path: Path, kinds: set[str]) -> Iterator[Raised]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name not in kinds or not node.args:
            continue
        hint = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "hint"), None)
        message = " ".join(_text(node.args[0]).split())
        if message.strip("…:, "):
            yield Raised(name, message, " ".join(_text(hint).split()))


def raised() -> list[Raised]:
    """All of them, each once, by class and message."""
    from moorage.errors import exit_codes

    kinds = {name for _, name, _ in exit_codes()}
    found: dict[tuple[str, str], Raised] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "errors.py":
                continue
            for one in _calls(path, kinds):
                known = found.get((one.kind, one.message))
                if known is None or not known.cure:
                    found[one.kind, one.message] = one
    return sorted(found.values())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


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
        mine = [one for one in everything if one.kind == name]
        if mine:
            lines += ["", "| message | cure |", "|---|---|"]
            lines += [f"| {_cell(one.message)} | {_cell(one.cure) or 'see above'} |" for one in mine]
    return "\n".join(lines) + "\n"
