"""A finished copy of the pod's files as bytes, so that a worker that follows can bring it into the store."""

from __future__ import annotations

from pathlib import Path

from moorage.errors import CorruptData
from moorage.worker.guard.files import write_private
from moorage.worker.layers import LayerCapture

FILE = "layer.capture"


def save(capture: LayerCapture, staging: Path) -> None:
    """Write `FILE` into the staging folder. Raises `OSError`."""
    write_private(staging / FILE, capture.encode())


def load(staging: Path) -> LayerCapture:
    """What `save` wrote. Raises `CorruptData` when the worker died before it was written."""
    try:
        return LayerCapture.decode((staging / FILE).read_bytes())
    except FileNotFoundError:
        raise CorruptData("the worker was restarted before the capture was complete") from None
