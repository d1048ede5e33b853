"""What went wrong in a CRIU dump or restore, in one line that a user can act on. Pure: text in, error out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from moorage.errors import EnvironmentLacking, MoorageError, Refused

_ERROR: Final = re.compile(r"^\([\d.]+\)\s+(?:(?P<pid>\d+): )?Error \((?P<place>[^)]*)\): ?(?P<text>.*)$")
_TASK: Final = re.compile(
    r"(?:Dumping task|Dumping processes|Dumping opened files) \(pid: (?P<pid>\d+)(?: comm: (?P<comm>.*))?\)"
)
_DESCRIPTOR: Final = re.compile(r"\) (?P<pid>\d+) fdinfo (?P<fd>\d+):")
_PATH: Final = re.compile(r"Dumping path for -?\d+ fd via self \d+ \[(?P<path>.*)\]$")

#: Said on machines where root lacks a capability; CRIU goes on without.
_HARMLESS: Final = ("rlimit: Can't setup RLIMIT_NOFILE for self", "Could not process rule: File exists")
#: Follow from an earlier error and explain nothing.
_FOLLOWING: Final = (
    "Dumping FAILED",
    "Restoring FAILED",
    "Dump files (pid:",
    "Dump mappings (pid:",
    "Collect mappings (pid:",
    "failed with -1",
    "exited, status=",
    "killed by signal",
    "Unable to restore",
)


class Rule(NamedTuple):
    """A CRIU message, what it means, and the way out. Groups of the pattern may be used in both."""

    pattern: re.Pattern[str]
    meaning: str
    cure: str


def _rule(pattern: str, meaning: str, cure: str) -> Rule:
    return Rule(re.compile(pattern), meaning, cure)


#: What a pod can hold that CRIU cannot save: a refusal, the pod runs on.
_REFUSALS: Final = (
    _rule(
        r"In-flight connection",
        "a TCP connection that the listening program has not accepted yet",
        "try again; if it stays, the program must accept its connections",
    ),
    _rule(
        r"Non-empty write queue on an in-flight socket",
        "a connection over a unix socket that was not accepted yet, with data in it",
        "try again; if it stays, the program must accept its connections",
    ),
    _rule(
        r"netlink: The socket has data to read",
        "a netlink socket with messages that nobody has read",
        "try again; if it stays, the program must read them or close it",
    ),
    _rule(
        r"Control messages in queue",
        "a unix socket with messages that nobody has read and that come with credentials (SO_PASSCRED)",
        "try again; if it stays, the program must read them or close it",
    ),
    _rule(
        r"(?:External socket is used|Unix socket .* without peer|unix: .*[Ee]xternal)",
        "a unix socket whose other end is outside the pod",
        "close the connection to the program outside",
    ),
    _rule(
        r"Can't create link remap for (?P<path>.+?)\. Use",
        "the open file {path}, whose name was removed while the file has another",
        "close it, or open it by the name that is left",
    ),
    _rule(
        r"Can't dump ghost file (?P<path>\S+) of (?P<size>\d+) size",
        "the deleted open file {path} of {size} bytes",
        "close it before the checkpoint",
    ),
    _rule(
        r"[Aa] session leader of \d+\(\d+\) is outside of its pid namespace|session leader .* outside",
        "a process whose session began outside the pid namespace of the pod",
        "let `moorage exec` end first",
    ),
    _rule(
        r"(?:is ptrace|being traced|already traced|ptrace.*Operation not permitted|Unable to (?:seize|attach))",
        "a process that a debugger traces",
        "detach strace, gdb or the profiler",
    ),
    _rule(
        r"Can't dump (?:half of stopped )?(?P<kind>netlink|packet|raw|SCTP|vsock|bluetooth)",
        "a {kind} socket that cannot be saved",
        "close it before the checkpoint",
    ),
    _rule(
        r"BUG! Unknown socket collected|Unsupported (?:proto|socket|type).*|Unknown socket.*|Can't dump socket",
        "a socket of a kind that cannot be saved",
        "close it before the checkpoint",
    ),
    _rule(
        r"Can't dump file \d+ of that type|Unknown shit|Unsupported (?:file|fd) type",
        "a file of a kind that cannot be saved",
        "close it before the checkpoint",
    ),
    _rule(r"Can't lookup mount=|mount .* is not found", "a file on a mount that is no longer in the pod", "close it"),
    _rule(
        r"Mount .* unreachable|doesn't have a proper root mount|Unsupported (?:mount|FS)|FS mnt .* unsupported",
        "a mount that a process of the pod made",
        "unmount it, or give it with --mount",
    ),
    _rule(r"nested (?:pid|user) namespace|Can't dump nested", "a namespace that a process of the pod made", "end it"),
    _rule(
        r"Timeout reached. Try to interrupt|Unseizable non-zombie",
        "a process that does not stop: it waits in the kernel, for a child after vfork or for a file system",
        "try again; if it stays, see /proc/PID/stack",
    ),
    _rule(r"io_uring", "an io_uring instance", "use epoll: the pod answers ENOSYS to io_uring_setup"),
)

#: What the machine lacks: an error of the machine, not of the pod.
_LACKS: Final = (
    _rule(
        r"Can't [gs]et rlimit .*Operation not permitted",
        "root lacks CAP_SYS_RESOURCE here, without which CRIU cannot save or restore processes of another user",
        "install moorage anew (it lacks moorage-criu-limits.so), or run the worker with all capabilities",
    ),
    _rule(r"No space left on device", "no space is left on this node's disk", "make room"),
)

_RESTORE: Final = (
    _rule(
        r"File (?P<path>\S+) has bad size (?P<size>\d+) \(expect (?P<expected>\d+)\)",
        "the file {path} has {size} bytes here and had {expected} when the pod was saved",
        "restore on a node with the same files, or use --image",
    ),
    _rule(
        r"File (?P<path>\S+) has bad build-ID",
        "the program or library {path} is another version here than when the pod was saved",
        "restore on a node with the same packages, or use --image",
    ),
    _rule(
        r"Can't open file (?P<path>\S+) on restore|openat2?\(\S+ (?P<other>\S+)\).*No such file",
        "the file {path}, which the pod had open, does not exist here",
        "restore on a node with the same files, or use --image",
    ),
    _rule(
        r"Can't bind inet socket|Address already in use|Cannot assign requested address",
        "an address that the pod uses cannot be used here",
        "see the restore log",
    ),
    _rule(
        r"[Cc]pu .*(?:capabilit|feature|mismatch)|CPU .* not supported",
        "this node's CPU lacks what the pod uses",
        "restore on a node of the same kind",
    ),
    _rule(r"Pid \d+ do not match|pid.*already exists|EEXIST.*pid", "a process id of the pod is taken", "restore again"),
    _rule(r"Cannot allocate memory|Can't mmap.*ENOMEM", "too little memory on this node", "restore on another node"),
)


class Finding(NamedTuple):
    """An error line with where CRIU was: process (host pid at a dump, pod pid at a restore) and open file."""

    text: str
    pid: int = 0
    name: str = ""
    descriptor: int = -1
    path: str = ""


def findings(log: str) -> Iterator[Finding]:
    """The errors in CRIU's log that explain something, in order."""
    names: dict[int, str] = {}
    pid, descriptor, path = 0, -1, ""
    for line in log.splitlines():
        if (error := _ERROR.match(line)) is not None:
            text = error["text"].strip()
            if not any(word in text for word in (*_HARMLESS, *_FOLLOWING)):
                where = int(error["pid"] or pid)
                yield Finding(text, where, names.get(where, ""), descriptor, path)
        elif (at := _DESCRIPTOR.search(line)) is not None:
            pid, descriptor, path = int(at["pid"]), int(at["fd"]), ""
        elif (seen := _PATH.search(line)) is not None:
            path = seen["path"]
        elif (task := _TASK.search(line)) is not None:
            pid, descriptor, path = int(task["pid"]), -1, ""
            if task["comm"]:
                names[pid] = task["comm"]


def explain(log: str, operation: str, words: str, path: Path) -> MoorageError:
    """The error to raise when ``operation`` (``checkpoint`` or ``restore``) has failed.

    ``words`` is what runc said, used when CRIU's ``log`` (the file at ``path``) explains nothing. `Refused` names what
    cannot be saved, by process and descriptor, `EnvironmentLacking` what the machine lacks; anything else is a
    `MoorageError`.
    """
    found = list(findings(log))
    saving = operation == "checkpoint"
    for finding in found:
        for rule in _LACKS:
            if rule.pattern.search(finding.text):
                return EnvironmentLacking(f"CRIU's {operation} failed: {rule.meaning}", rule.cure)
        for rule in _REFUSALS if saving else _RESTORE:
            if (match := rule.pattern.search(finding.text)) is None:
                continue
            meaning = rule.meaning.format_map({k: v or "" for k, v in match.groupdict().items()})
            if saving:
                return Refused(f"{_place(finding)} holds {meaning}", rule.cure)
            return MoorageError(f"the pod cannot be restored here: {meaning}", rule.cure)
    if found:
        first = found[0]
        place = _place(first) + ": " if saving and first.pid else ""
        return MoorageError(f"CRIU's {operation} failed: {place}{first.text}", f"see {path}")
    return MoorageError(f"CRIU's {operation} failed: {words}", f"see {path}")


def _place(finding: Finding) -> str:
    if not finding.pid:
        return "the pod"
    place = f"process {finding.name or '?'} (pid {finding.pid})"
    if finding.descriptor < 0:
        return place
    return f"{place}, descriptor {finding.descriptor}" + (f" ({finding.path})" if finding.path else "")
