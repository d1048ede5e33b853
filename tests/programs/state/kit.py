"""What the programs of this folder share: the nonce, the loop, the last word.

A program prints ``ready NONCE`` when its state stands, looks at it many times a second until the file that
``STATE_STOP`` names exists, and ends with ``pass NONCE STEPS``, or at once with ``FATAL what`` and exit code 70. Where
the kernel does not offer what it is about, it prints ``lacks why`` and exits with 0.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

libc = ctypes.CDLL(None, use_errno=True)
_PAUSE = 0.1  # fifty of them share two cores with the job that is moved


class Broken(Exception):
    """The state is not what it was."""


class Lacks(Exception):
    """This kernel or machine does not offer it."""


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def check(condition: object, what: str) -> None:
    if not condition:
        raise Broken(what)


def equal(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Broken(f"{what}: {found!r:.300} instead of {wanted!r:.300}")


def pattern(nonce: bytes, size: int, label: object = "") -> bytes:
    """``size`` bytes that only who knows the nonce can foretell."""
    return hashlib.shake_128(nonce + str(label).encode()).digest(size)


def call(name: str, *arguments: object) -> int:
    """A function of the C library. Raises `OSError`."""
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


T = TypeVar("T")


def call_until(call: Callable[[], T], seconds: float = 30.0) -> T:
    """What ``call`` gives, tried again while it fails: the other end may not be there yet. Raises its last error."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except (OSError, Broken):
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)


def fork(child: Callable[[], None]) -> int:
    """Run ``child`` in a process of its own, which ends with it; its pid. The child dies with the parent."""
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(1, 9)
        child()
    except BaseException as error:
        say(f"FATAL in a child: {type(error).__name__} {error}")
        os._exit(70)
    os._exit(0)


def run(program: Callable[[bytes], Iterator[None]]) -> NoReturn:
    """Carry ``program`` out: what comes before its first ``yield`` sets up, each later part is one look."""
    nonce = os.urandom(16)
    stop = os.environ.get("STATE_STOP", "stop")
    looks = program(nonce)
    steps = 0
    try:
        next(looks)
        say(f"ready {nonce.hex()}")
        while not os.path.exists(stop):
            next(looks)
            steps += 1
            time.sleep(_PAUSE)
        next(looks)
    except Lacks as why:
        say(f"lacks {why}")
        os._exit(0)
    except BaseException as error:
        place = error.__traceback__
        line = 0
        while place is not None:
            if place.tb_frame.f_code.co_filename != __file__:
                line = place.tb_lineno
            place = place.tb_next
        say(f"FATAL step {steps} line {line}: {type(error).__name__} {error}")
        os._exit(70)
    say(f"pass {nonce.hex()} {steps}")
    sys.stdout.flush()
    os._exit(0)
