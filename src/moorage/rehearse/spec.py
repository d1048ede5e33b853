"""The section ``rehearse`` of a job file: what the job writes, how equal it must be, and how it is disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from moorage.errors import UsageError

Kind = Literal["lines", "json", "bytes"]
Across = Literal["", "equal", "joined"]


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of each rank. ``path`` is below the working directory; ``{rank}`` stands for the rank.

    ``kind``: ``lines`` (fields between blanks, compared one by one; the one at ``step`` is the number of the step),
    ``json`` (``ignore`` names fields that may differ) or ``bytes``. ``tolerance`` and ``relative`` say how far two
    numbers may lie apart; 0 and 0: bit for bit. ``across``: ``equal`` when all ranks must have written the same,
    ``joined`` when the ranks' files are parts of one whole whose seams may lie elsewhere.
    """

    path: str
    kind: Kind = "lines"
    step: int = 0
    tolerance: float = 0.0
    relative: float = 0.0
    ignore: tuple[str, ...] = ()
    across: Across = ""


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``checkpoints`` and ``restores``: how many, at instants that follow from ``seed``.

    ``begin`` and ``end``: between which parts of the undisturbed run's time.
    """

    outputs: tuple[Output, ...]
    seed: int = 0
    checkpoints: int = 2
    restores: int = 2
    begin: float = 0.15
    end: float = 0.8


def read(path: Path, content: dict[str, Any]) -> tuple[dict[str, Any], Rehearsal]:
    """The job's own fields, and the section. ``${here}`` is the file's folder. Raises `UsageError`."""
    job = _filled({name: value for name, value in content.items() if name != "rehearse"}, path)
    if "rehearse" not in content:
        raise UsageError(f"{path} has no section `rehearse`", "declare at least `outputs`: docs/rehearse.md")
    try:
        found = msgspec.convert(content["rehearse"], Rehearsal)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: rehearse: {error}", "docs/rehearse.md has all fields") from None
    if not found.outputs:
        raise UsageError(f"{path}: rehearse: no outputs are declared", "there would be nothing to compare")
    if found.restores < 1 or found.checkpoints < 0 or not 0 <= found.begin < found.end <= 1:
        raise UsageError(
            f"{path}: rehearse: {found.checkpoints} checkpoints and {found.restores} restores from {found.begin:g} to "
            f"{found.end:g} of the run cannot be",
            "at least one restore, between 0 and 1",
        )
    return job, found


def _filled(value: Any, path: Path) -> Any:
    import sys

    if isinstance(value, str):
        return value.replace("${here}", str(path.resolve().parent)).replace("${python}", sys.executable)
    if isinstance(value, list):
        return [_filled(item, path) for item in value]
    if isinstance(value, dict):
        return {name: _filled(item, path) for name, item in value.items()}
    return value
