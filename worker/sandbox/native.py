"""Where the programs and libraries that are built from ``native/`` lie."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path

from moorage.errors import EnvironmentLacking


def find(name: str, folder: str, *, variable: str = "") -> Path:
    """The newest built file ``name`` of ``native/<folder>``; the environment's ``variable`` overrules what is found.

    Raises `EnvironmentLacking`.
    """
    import moorage

    package = Path(moorage.__file__).parent
    candidates = [package / "_native" / name, package.parents[1] / "build" / "native" / "native" / folder / name]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # An editable installation has the sources here and what was built in site-packages.
        installed = importlib.metadata.distribution("moorage").locate_file(f"moorage/_native/{name}")
        candidates.append(Path(str(installed)))
    if explicit := os.environ.get(variable or "MOORAGE_NATIVE_NONE"):
        candidates = [Path(explicit)]
    built = [candidate for candidate in candidates if os.access(candidate, os.R_OK)]
    if built:
        return max(built, key=lambda candidate: candidate.stat().st_mtime)  # whoever changes it wants the newest
    hint = "install moorage from a wheel, or run `cmake -S . -B build/native && cmake --build build/native`"
    raise EnvironmentLacking(f"{name} is not built", hint)
