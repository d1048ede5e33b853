"""What a command prints: data on stdout as table, JSON or YAML; progress and remarks on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from moorage.cli.values import human_bytes, human_seconds

Column = tuple[str, Callable[[Any], str]]


def builtins(value: Any) -> Any:
    """``value`` as dictionaries, lists, strings and numbers. `msgspec.Raw` JSON is decoded."""

    def decode(raw: Any) -> Any:
        if isinstance(raw, msgspec.Raw):
            return msgspec.json.decode(raw)
        raise NotImplementedError(type(raw).__name__)

    return msgspec.to_builtins(value, enc_hook=decode)


def write(value: Any, output: str, *, columns: Sequence[Column] = (), empty: str = "") -> None:
    """Print a struct or a list of structs in the format asked for. ``columns`` makes the table of a list."""
    if output == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(builtins(value))).decode() + "\n")
    elif output == "yaml":
        import yaml

        yaml.safe_dump(builtins(value), sys.stdout, sort_keys=False, allow_unicode=True)
    elif isinstance(value, list):
        _table(value, columns, empty)
    else:
        _fields(builtins(value))
    sys.stdout.flush()


def line(value: Any, output: str, text: str) -> None:
    """One item of an endless list: a line of text, or one line of JSON (``yaml``: one document)."""
    if output == "json":
        sys.stdout.write(msgspec.json.encode(builtins(value)).decode() + "\n")
    elif output == "yaml":
        import yaml

        yaml.safe_dump(builtins(value), sys.stdout, sort_keys=False, allow_unicode=True, explicit_start=True)
    else:
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _table(rows: list[Any], columns: Sequence[Column], empty: str) -> None:
    if not rows:
        remark(empty or "nothing")
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title, _ in columns:
        table.add_column(title.upper(), overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    # A pipe has no width: give every column what it needs, so that no program meets a wrapped line.
    console = Console() if sys.stdout.isatty() else Console(width=10_000)
    console.print(table)


def _fields(value: dict[str, Any], indent: str = "") -> None:
    width = max((len(name) for name in value), default=0)
    for name, item in value.items():
        if isinstance(item, dict):
            sys.stdout.write(f"{indent}{name}:\n")
            _fields(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            sys.stdout.write(f"{indent}{name}:\n")
            for element in item:
                sys.stdout.write(f"{indent}  - {' '.join(f'{k}={v}' for k, v in element.items() if v != '')}\n")
        else:
            text = ", ".join(map(str, item)) if isinstance(item, list) else item
            sys.stdout.write(f"{indent}{name:<{width}}  {'' if text is None else text}\n")


def message_fields(message: Any) -> dict[str, Any]:
    """The fields of a protobuf message that are set, as dictionaries, lists, strings and numbers."""

    def plain(field: Any, value: Any) -> Any:
        if field.message_type is not None:
            return message_fields(value)
        return field.enum_type.values_by_number[value].name if field.enum_type is not None else value

    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = [plain(field, item) for item in value]
        else:
            found[field.name] = plain(field, value)
    return found


def remark(text: str) -> None:
    """A line for the person at the terminal, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def when(moment: float) -> str:
    """A moment for a table: local time, empty for never."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""


def age(moment: float) -> str:
    """How long ago a moment was."""
    return human_seconds(max(0.0, time.time() - moment)) if moment else ""


bytes_text = human_bytes


@contextmanager
def progress(label: str) -> Iterator[Callable[[str, float | None], None]]:
    """A progress bar on a terminal's stderr, else nothing. Yields ``update(step, fraction or None)``."""
    if not sys.stderr.isatty():
        yield lambda step, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def update(step: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, description=f"{label}: {step}", total=total, completed=fraction or 0.0)

        yield update
