"""Resource limits that this process may hand to a pod."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

Limits = Mapping[str, tuple[int, int]]

_UNLIMITED: Final = 2**64 - 1  # as the kernel and runc write it; Python's resource module says -1
#: Root inside a container often lacks it; CRIU cannot save processes of another user without.
CAP_SYS_RESOURCE: Final = 24


def clamp(wanted: Limits, hard_limits: Mapping[str, int], *, may_raise: bool) -> dict[str, tuple[int, int]]:
    """``wanted`` (name to soft, hard), kept within this process's ``hard_limits`` unless it may raise them."""
    out = {}
    for name, (soft, hard) in wanted.items():
        ceiling = _UNLIMITED if may_raise else hard_limits.get(name, _UNLIMITED)
        out[name] = (min(soft, hard, ceiling), min(hard, ceiling))
    return out


def permitted(wanted: Limits) -> dict[str, tuple[int, int]]:
    """``wanted`` as far as this process, an ancestor of the pod, may grant it.

    Real root may grant everything; root inside a container often lacks CAP_SYS_RESOURCE, and runc would then refuse
    to start the pod at all.
    """
    hard_limits = {}
    for name in wanted:
        hard = resource.getrlimit(getattr(resource, name))[1]
        hard_limits[name] = _UNLIMITED if hard == resource.RLIM_INFINITY else hard
    return clamp(wanted, hard_limits, may_raise=has_capability(CAP_SYS_RESOURCE))


def has_capability(number: int) -> bool:
    """Whether this process has that capability in effect."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
