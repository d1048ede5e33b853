"""Options that many commands share, and the client that they make."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from moorage import config
from moorage.cli import completing
from moorage.errors import UsageError

if TYPE_CHECKING:
    from moorage.coordinator.client import Client

Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="table|json|yaml", help="How to print data.", show_default=False)
]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's name or id.", autocompletion=completing.job_names)
]
#: One that may be over as well.
AnyJobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's name or id.", autocompletion=completing.all_job_names)
]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's id.", autocompletion=completing.checkpoint_ids)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]

#: Flags given before the command (`moorage --coordinator HOST:PORT jobs`), by `moorage.config` name.
global_flags: dict[str, str | None] = {}
config_file: list[str | None] = [None]


def output_format(flag: str | None) -> str:
    """The output format: the flag, else the settings. Raises `UsageError`."""
    flags = dict(global_flags)
    if flag:
        flags["output"] = flag
    return config.output_format(config.client_settings(flags, config=config_file[0]))


def local_output_format(flag: str | None) -> str:
    """The same for commands that need no cluster: they work also when the configured files are gone."""
    return config.output_format({"output": flag or os.environ.get("MOORAGE_OUTPUT") or "table"})


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone. Raises `UsageError` where nobody can be asked, and aborts on no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("this asks before it begins, and there is no terminal", "say -y")
    sys.stderr.write(f"{question}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


@contextmanager
def client(*, patience: float = 30.0) -> Iterator[Client]:
    """A client from flags, environment and files. Raises `UsageError` if no coordinator is configured."""
    from moorage.cli import output
    from moorage.coordinator.client import Client

    settings = config.client_config(global_flags, config=config_file[0])
    with Client(config=settings, patience=patience, on_silence=output.remark) as made:
        yield made
