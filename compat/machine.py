"""The fingerprint of the node on which this runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import moorage
from moorage.compat import features, gpu
from moorage.compat.fingerprint import NodeFingerprint
from moorage.errors import EnvironmentLacking, UsageError
from moorage.runtime import programs

#: For tests only: a folder of JSON files, each named after a node, with fields that stand for what that node has.
OVERRIDES = "MOORAGE_FINGERPRINT_OVERRIDES"


def cpu(text: str) -> tuple[str, str]:
    """Model name and flags of the first processor in the text of ``/proc/cpuinfo``. Pure."""
    first = text.split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return fields.get("model name", ""), fields.get("flags", fields.get("Features", ""))


def program_version(name: str) -> str:
    """The version of a program of the runtime; empty if it is not there."""
    try:
        found = programs.version(name, programs.find(name))
    except EnvironmentLacking:
        return ""
    return programs.text(found) if found else ""


def libc() -> str:
    """The C library of this machine, such as ``glibc 2.41``; empty where it does not say."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def look(node: str = "", *, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> NodeFingerprint:
    """Look at this machine; takes about 0.1 s. ``node``: whose overrides count. Raises `UsageError` for a bad one."""
    name, flags = cpu(Path("/proc/cpuinfo").read_text())
    gpus = gpu.look(nvml=nvml)
    found = NodeFingerprint(
        architecture=platform.machine(),
        kernel=platform.release(),
        cpu=name,
        cpu_features=features.visible(flags),
        libc=libc(),
        criu=program_version("criu"),
        runc=program_version("runc"),
        driver=gpus.driver,
        cuda=gpus.cuda,
        gpus=gpus.gpus,
        moorage=moorage.__version__,
    )
    return _overridden(found, node, environ)


def _overridden(found: NodeFingerprint, node: str, environ: Mapping[str, str]) -> NodeFingerprint:
    folder = environ.get(OVERRIDES)
    path = Path(folder, f"{node}.json") if folder and node else None
    if path is None or not path.exists():
        return found
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert({**msgspec.to_builtins(found), **fields}, NodeFingerprint)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}", "it stands for a node's fingerprint, in tests only") from error
