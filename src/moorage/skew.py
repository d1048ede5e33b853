"""Which releases speak with each other: the same one, and the ones next to it. Pure.

Every call says who speaks: its own version, and the release before it. So of two neighbours it does not matter which
one is newer, also over a change of the first number, whose predecessor the older one cannot know.
"""

from __future__ import annotations

from moorage import __version__
from moorage.errors import Incompatible

#: The release before this one, as MAJOR.MINOR. Change it with the version.
PREVIOUS = "0.0"
#: What is assumed of a caller that says nothing: releases before this rule.
UNSAID = "0.0.0"
KEY = "moorage-version"


def release(version: str) -> str:
    """MAJOR.MINOR of a version: releases that differ only behind that are the same."""
    return ".".join(version.split("+")[0].split(".")[:2])


def said() -> str:
    """What this process says of itself."""
    return f"{__version__} {PREVIOUS}"


def check(theirs: str, what: str, *, ours: str = "") -> None:
    """Raise `Incompatible` unless the two may speak with each other. Both are as `said` makes them; empty: `UNSAID`."""
    their_version, _, their_previous = (theirs or UNSAID).partition(" ")
    our_version, _, our_previous = (ours or said()).partition(" ")
    their, our = release(their_version), release(our_version)
    if their in (our, our_previous) or our == their_previous:
        return
    raise Incompatible(
        f"{what} is moorage {their_version}, and this is {our_version}: more than one release apart",
        "bring the older of the two to the release in between first",
    )
