"""Durations and sizes as people write them. Pure."""

from __future__ import annotations

import re

from moorage.errors import UsageError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BYTES |= {f"{unit}i": 1024 ** (index + 1) for index, unit in enumerate("kmgt")}


def seconds(text: str, flag: str = "duration") -> float:
    """``10m``, ``1h30m``, ``500ms`` or a bare number of seconds. Raises `UsageError` naming ``flag``."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise UsageError(f"{flag} {text!r} is not a duration", "write 30s, 10m, 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def size(text: str, flag: str = "size") -> int:
    """``64GiB``, ``500M`` or a bare number of bytes. Raises `UsageError` naming ``flag``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not found:
        raise UsageError(f"{flag} {text!r} is not a size", "write 64GiB, 500M, 1048576")
    return int(float(found[1]) * _BYTES[found[2] or ""])


def human_bytes(count: float) -> str:
    """A size for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(duration: float) -> str:
    """A duration for people: ``0.84 s``, ``3m12s``, ``5h03m``, ``2d4h``."""
    if duration < 60:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.0f} s"
    whole = int(duration)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def pairs(items: list[str] | None, flag: str) -> dict[str, str]:
    """``NAME=VALUE`` items as a dictionary; a bare ``NAME`` takes the value from the environment."""
    import os

    result: dict[str, str] = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not name:
            raise UsageError(f"{flag} {item!r} has no name", f"write {flag} NAME=VALUE")
        if not equals:
            if name not in os.environ:
                raise UsageError(f"{flag} {name}: the environment has no such variable", f"write {flag} {name}=VALUE")
            value = os.environ[name]
        result[name] = value
    return result
