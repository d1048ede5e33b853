"""CRIU's options for one pod, in a file that the container's annotation ``org.criu.config`` names.

A file of the pod's own, because one in ``/etc/criu`` would change what other programs get from CRIU. The guard writes
it before each dump and restore.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from moorage.errors import EnvironmentLacking
from moorage.worker.sandbox import limits, native
from moorage.worker.sandbox.cgroup import PodCgroup

#: Names in the pod's folder.
CONFIG_FILE: Final = "criu.conf"
HOLD_FILE: Final = "criu-hold.sh"

_OPTIONS: Final = (
    "tcp-established",
    "file-locks",
    # Deleted files that are still open (shared memory, temporary files) are saved whatever their size; CRIU knows no T.
    "ghost-limit 1024G",
    # The linked library; the default needs the iptables programs.
    "network-lock nftables",
    # An open file whose name was removed while it has another. CRIU's own way back, a link that it makes for the time
    # of the dump, is not used: `mend` names the file by the name that is left.
    "link-remap",
)
# Not used on purpose:
# tcp-skip-in-flight: a connection that was not accepted yet would be reset at restore. `backlog` takes them out of
#   their queues before the dump and puts them back.


#: Stands for prlimit(2) of another user's process where root may not call it: see native/criu_limits.
LIMITS_LIBRARY: Final = "moorage-criu-limits.so"


#: The version of the library that this code speaks to, as in native/criu_limits/kernel.h: another one would leave out
#: what it does not know, without a word.
LIMITS_VERSION: Final = 2
_MARK: Final = re.compile(rb"moorage-criu-library (\d+);")
#: In the folder where a restore works: what the library says in CRIU's place, see native/criu_limits/mends.cpp.
MENDS_FILE: Final = "mends"
#: In the folder where a dump works: the pod has POSIX timers that signal single threads.
THREAD_TIMERS_FILE: Final = "thread-timers"


def environment(work: Path) -> dict[str, str]:
    """Variables that CRIU needs on this machine, and for what it does in the folder ``work``, beside the usual ones."""
    # CRIU 4.2 takes a thread's number from memory that it has not written to, and gives up when it finds 0 there. The
    # number is put right before the restore (`mend`), so it only must not be 0.
    fill = {"MALLOC_PERTURB_": "90"} if (work / THREAD_TIMERS_FILE).exists() else {}
    try:
        mends = {"MOORAGE_CRIU_MENDS": (work / MENDS_FILE).read_text()}
    except FileNotFoundError:
        mends = {}
    return _preload(bool(mends)) | mends | fill


def _preload(needed: bool) -> dict[str, str]:
    if limits.has_capability(limits.CAP_SYS_RESOURCE) and not needed:
        return {}
    return {"LD_PRELOAD": str(library())}


def library() -> Path:
    """What is preloaded into CRIU. Raises `EnvironmentLacking` if it is not there, or of another version of moorage."""
    found = find_library()
    if lack := lacking(found):
        raise EnvironmentLacking(
            lack, "install moorage anew, or run `make setup` where it was installed from its sources"
        )
    return found


def find_library() -> Path:
    """The library, whatever its version. Raises `EnvironmentLacking`."""
    return native.find(LIMITS_LIBRARY, "criu_limits", variable="MOORAGE_CRIU_LIBRARY")


def lacking(found: Path) -> str:
    """What is wrong with this library, in words; empty: nothing."""
    mark = _MARK.search(found.read_bytes())
    if mark is not None and int(mark[1]) == LIMITS_VERSION:
        return ""
    which = f"version {mark[1].decode()}" if mark else "a version before 2"
    return (
        f"{found} is of another version of moorage ({which}, and {LIMITS_VERSION} is needed): "
        "what CRIU leaves out would come back wrong"
    )


def usable() -> None:
    """Raises `EnvironmentLacking` where no pod can be saved rightly: the library is of another version, or not there
    though root lacks a capability. With that one only some pods need it, which `library` says when they are captured.
    """
    try:
        find_library()
    except EnvironmentLacking:
        if limits.has_capability(limits.CAP_SYS_RESOURCE):
            return
    library()


def dump_options() -> str:
    """The file's text for a dump. Pure."""
    return "".join(f"{option}\n" for option in _OPTIONS)


def restore_options(hold: Path) -> str:
    """The file's text for a restore that runs the script ``hold``. Pure."""
    return dump_options() + f'action-script "{hold}"\n'


def hold_script(cgroup: PodCgroup) -> str:
    """A script for CRIU that freezes the pod while CRIU still holds every task, so that none runs an instruction
    before the pod is released. CRIU works from within the pod's cgroup: it and the script leave it first. Pure."""
    switch, word = ("cgroup.freeze", "1") if cgroup.unified else ("freezer.state", "FROZEN")
    return (
        "#!/bin/sh\n"
        '[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0\n'
        f"echo $PPID > '{cgroup.root}/cgroup.procs'\n"
        f"echo $$ > '{cgroup.root}/cgroup.procs'\n"
        f"echo {word} > '{cgroup.folder}/{switch}'\n"
    )


def write_for_dump(folder: Path) -> None:
    """Write `CONFIG_FILE` for a dump."""
    _write(folder / CONFIG_FILE, dump_options(), 0o600)


def write_for_restore(folder: Path, cgroup: PodCgroup) -> None:
    """Write `CONFIG_FILE` and `HOLD_FILE` for a restore."""
    _write(folder / HOLD_FILE, hold_script(cgroup), 0o700)
    _write(folder / CONFIG_FILE, restore_options(folder / HOLD_FILE), 0o600)


def _write(path: Path, text: str, mode: int) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode)
    path.chmod(mode)
    path.write_text(text)
