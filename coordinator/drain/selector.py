"""Label selectors in kubectl's words: ``rack=7,gpu!=h200,zone in (a,b),!spot``. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from moorage.errors import UsageError

_KEY = r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?"
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s+\(([^()]*)\)")
_EQUAL = re.compile(rf"({_KEY})\s*(==|=|!=)\s*([A-Za-z0-9._-]*)")
_THERE = re.compile(rf"(!?)\s*({_KEY})")

Selector = Callable[[Mapping[str, str]], bool]


def parse(text: str) -> Selector:
    """Whether labels match; all requirements must hold, none given matches everything. Raises `UsageError`.

    As in kubectl, ``!=`` and ``notin`` also match where the label is absent.
    """
    tests = [_requirement(part) for part in _split(text)]
    return lambda labels: all(test(labels) for test in tests)


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", text)]
    if parts == [""]:
        return []
    if "" in parts:
        raise UsageError(f"selector {text!r} has an empty requirement", "write rack=7,zone in (a,b)")
    return parts


def _requirement(text: str) -> Selector:
    if found := _SET.fullmatch(text):
        key, values = found[1], {value.strip() for value in found[4].split(",")}
        if found[3] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _EQUAL.fullmatch(text):
        key, value = found[1], found[4]
        if found[3] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _THERE.fullmatch(text):
        key, absent = found[2], bool(found[1])
        return lambda labels: (key in labels) != absent
    raise UsageError(f"{text!r} is no label requirement", "write KEY=VALUE, KEY!=VALUE, KEY in (A,B), KEY or !KEY")


def driver_matches(driver: str, wanted: str) -> bool:
    """Whether ``driver`` is the version ``wanted``, or one below it: 570 stands for 570.86.15."""
    return bool(driver) and (driver == wanted or driver.startswith(wanted + "."))
