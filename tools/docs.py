#!/usr/bin/env python3
"""Write the pages of docs/ that are made from the code: exit codes, errors, the command line's reference and others.

``tools/docs.py`` writes them, ``tools/docs.py --check`` says which are not current (exit code 1).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(Path(__file__).resolve().parent))


def exit_codes() -> str:
    """docs/exit-codes.md"""
    from moorage.errors import exit_codes as rows

    lines = [
        "# Exit codes",
        "",
        "`moorage run`, `torchrun`, `wait` and `exec` end with the exit code of what they ran (0 to 119; 128 + the",
        "signal's number when it was killed by one). moorage's own codes begin at 200, above those of signals:",
        "",
        "| code | name | meaning |",
        "|---|---|---|",
        *(f"| {code} | `{name}` | {_meaning(name, text)} |" for code, name, text in rows()),
        "",
        "A job that was stopped, and a command that was ended by Ctrl-C, give 130, as a shell does.",
        "",
        "Every error is one line on stderr that names the thing, and one that says the way out. The Python API raises",
        "the class of that name from `moorage.errors`. This page is written by `tools/docs.py`.",
    ]
    return "\n".join(lines) + "\n"


def _meaning(name: str, text: str) -> str:
    return "Something failed that has no class of its own." if name == "MoorageError" else text.replace("``", "`")


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name in sorted(group.commands):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {parameter.help or ''} |"


def command_line() -> str:
    """docs/command-line.md"""
    import typer.main

    from moorage.cli import torchrun_flags
    from moorage.cli.main import app

    group: Any = typer.main.get_command(app)
    lines = [
        "# The command line",
        "",
        "Data goes to stdout, progress and remarks to stderr. `--output json` and `--output yaml` print what a program",
        "can read (`events` and `logs`: one object a line). Durations: `30s`, `10m`, `1h30m`; sizes: `64GiB`, `500M`.",
        "Exit codes: [exit-codes.md](exit-codes.md). This page is written by `tools/docs.py`.",
    ]
    for path, command in _commands(group, "moorage"):
        lines += ["", f"## {path}", "", (command.help or "").strip()]
        if path == "moorage torchrun":
            rows = [
                f"| {', '.join(f'`{name}`' for name in action.option_strings)} | {action.help or ''} |"
                for action in torchrun_flags.parser()._actions
                if action.option_strings
            ]
        else:
            arguments = [p for p in command.params if p.param_type_name == "argument"]
            if arguments:
                lines += ["", "`" + " ".join([path, *(p.metavar or p.name.upper() for p in arguments)]) + "`"]
            rows = [_option(p) for p in command.params if p.param_type_name == "option" and p.name != "help"]
        if rows:
            lines += ["", "| option | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def compatibility() -> str:
    """docs/compatibility.md"""
    from moorage.compat import features, rules

    head, _, tail = (DOCS.parent / "tools" / "pages" / "compatibility.md").read_text().partition("{{table}}\n")
    unseen = " ".join(sorted(features.UNSEEN))
    return head + rules.table() + tail.replace("{{unseen}}", textwrap.fill(unseen, 116))


def errors() -> str:
    """docs/errors.md"""
    import error_table

    return error_table.page()


def python_api() -> str:
    """docs/python-api.md"""
    import api_reference

    return api_reference.page()


PAGES = {
    "exit-codes.md": exit_codes,
    "command-line.md": command_line,
    "compatibility.md": compatibility,
    "errors.md": errors,
}
#: Written with the others, and not asked for at every change.
LAGGING = {"python-api.md": python_api}


def stale() -> list[str]:
    """Names of the pages that are missing or not current."""
    return [name for name, make in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != make()]


def main() -> None:
    if "--check" in sys.argv[1:]:
        if found := stale():
            sys.exit(f"not current: {', '.join(found)}; run `make docs`")
        return
    for name, make in (PAGES | LAGGING).items():
        (DOCS / name).write_text(make())


if __name__ == "__main__":
    main()
