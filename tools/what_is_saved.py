#!/usr/bin/env python3
"""Writes docs/what-is-saved.md from what the tests have found (build/what-is-saved/*.json).

Usage: what_is_saved.py [FOLDER-OF-RESULTS [PAGE]]. Run the tests first: `make what-is-saved` does both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEAD = """\
# What is saved

Written by `tools/what_is_saved.py` from what the tests found (`make what-is-saved`); not by hand. A checkpoint saves
the processes of a pod whole, or is refused before anything is touched. For each kind of state there is a program that
draws a random number, holds that kind, looks at it all the time and says at the end whether it is as it was
([tests/programs/state](../tests/programs/state)). All of them run in one pod, which is moved to another node and back,
and saved in between, at random instants; those that need another pod or the world as their other end run in two pods on
two of three nodes, and move there too ([tests/multinode/test_state.py](../tests/multinode/test_state.py)).

## Saved

| program | what it holds and looks at | found |
|---|---|---|
"""
_REFUSED = """
## Refused

`moorage checkpoint` (and park, move) looks for these first and says which process, what and the way out; the job runs
on. The messages are those that the tests got
([tests/multinode/test_refusals.py](../tests/multinode/test_refusals.py)).

| what | message |
|---|---|
"""
_TAIL = """
## Not saved, and not asked about

* Connections to the world (`ext0`) stay on a pod that runs on and on one that is restored on its node; elsewhere they
  are reset at once ([network](network.md)).
* A TCP connection that is not open yet is opened by its client's kernel, which asks again: one that asks while the pod
  stands still, or while a queue is full, comes in later, as without a checkpoint. The half of an opening that a
  listener keeps (`TCP_DEFER_ACCEPT`: the client is connected and has said nothing) is lost in a move, and the client's
  first word is answered with a reset; on a pod that runs on it stays.
* The processor time of a process begins at 0 after a restore, so `time.process_time()` goes back. Lost without a word
  are: memberships of multicast groups, urgent TCP data (`MSG_OOB`) that waits, the restrictions of Landlock and of
  `PR_SET_MDWE`, `F_NOTIFY` on folders, and that a file opened with `O_TMPFILE` may still be given a name.
* The flags of a folder that is open lack `O_DIRECTORY` after a restore; the personality (`setarch`) of a process is the
  usual one.

## Seen at the last moment

Some things cannot be read out of the kernel, but are gone as soon as the program looks: events of inotify, messages of
netlink, credentials in a unix socket's queue. A pod that is frozen in such a moment runs on for milliseconds and is
frozen again, for a second at most. If they stay, the checkpoint is refused with the name of the process, and the job
runs on.

Requests of asynchronous I/O (`io_submit`) may take two seconds to end while the pod stands still; those that are in
flight then (they wait for something, as `IOCB_CMD_POLL` does) are refused. That none is in flight is proved by counting
the places of the context ([decisions/0018](decisions/0018-calls-in-place.md)), on x86-64; elsewhere every context is
refused.

Connections over unix sockets that wait to be accepted are saved with what was sent over them, by connecting their
clients once more (the same decision). Nothing is taken out of a queue before all is open that puts it back. Refused, by
name, are those whose client is open in several processes, is bound to a name of its own, or sent descriptors; and those
of a listener that asks for credentials, or whose file the client does not find any more by its name (removed, renamed,
behind another root folder) or may not write.
"""


def page(folder: Path) -> str:
    """The page's text. Raises `FileNotFoundError` when the tests have not run."""
    programs = {}
    for table in ("programs", "pods"):
        programs |= json.loads((folder / f"{table}.json").read_text())
    refusals = json.loads((folder / "refusals.json").read_text())
    lines = [
        f"| `{name}` | {row['what']} | {row['result']}{': ' + row['note'] if row['note'] else ''} |"
        for name, row in sorted(programs.items())
    ]
    refused = [f"| {name} | {row['message']} |" for name, row in sorted(refusals.items())]
    return _HEAD + "\n".join(lines) + "\n" + _REFUSED + "\n".join(refused) + "\n" + _TAIL


if __name__ == "__main__":
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "what-is-saved"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "what-is-saved.md"
    target.write_text(page(results))
