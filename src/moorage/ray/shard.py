"""A worker's part of a data set that is a sequence: every n-th row. Pure.

Ray Data's streams are not had in a pod: `moorage.ray.trainer` takes their rows when the job begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Shard:
    """The rows ``rank``, ``rank + world``, … of ``rows``; all workers get equally many, as Ray's ``equal`` split."""

    def __init__(self, rows: Sequence[Any], rank: int, world: int) -> None:
        self._rows = rows
        self._numbers = range(rank, len(rows) - len(rows) % world, world)

    def __len__(self) -> int:
        return len(self._numbers)

    count = __len__

    def iter_rows(self) -> Iterator[Any]:
        """One row after another."""
        return (self._rows[number] for number in self._numbers)

    __iter__ = iter_rows

    def iter_batches(self, *, batch_size: int = 256, drop_last: bool = False, **_: Any) -> Iterator[Any]:
        """Batches: of rows that are mappings a mapping of arrays, else a list of rows."""
        batch: list[Any] = []
        for row in self.iter_rows():
            batch.append(row)
            if len(batch) == batch_size:
                yield _columns(batch)
                batch = []
        if batch and not drop_last:
            yield _columns(batch)

    def iter_torch_batches(
        self, *, batch_size: int = 256, drop_last: bool = False, dtypes: Any = None, device: Any = None, **_: Any
    ) -> Iterator[Any]:
        """The same as tensors."""
        import torch

        def tensor(values: Any, name: str | None = None) -> Any:
            dtype = dtypes.get(name) if isinstance(dtypes, dict) else dtypes
            return torch.as_tensor(values, dtype=dtype, device=device)

        for batch in self.iter_batches(batch_size=batch_size, drop_last=drop_last):
            if isinstance(batch, dict):
                yield {name: tensor(values, name) for name, values in batch.items()}
            else:
                yield tensor(batch)


def _columns(rows: list[Any]) -> Any:
    if not isinstance(rows[0], dict):
        return rows
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    try:
        import numpy
    except ImportError:
        return columns
    return {name: numpy.asarray(values) for name, values in columns.items()}
