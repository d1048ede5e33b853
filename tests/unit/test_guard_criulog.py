"""CRIU's logs, as it wrote them, and the one line that is made of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.errors import EnvironmentLacking, MoorageError, Refused
from moorage.worker.sandbox.criulog import explain, findings
from moorage.worker.sandbox.runc import last_words

HEAD = """\
(00.041912) Dumping processes (pid: 11255 comm: init)
(00.044014) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.050000) Dumping task (pid: 20709 comm: python3)
(00.060067) Dumping opened files (pid: 20709)
(00.060116) 20709 fdinfo 0: pos:                0 flags:           100000/0
(00.060128) Dumping path for 0 fd via self 15 [/dev/null]
(00.060244) 20709 fdinfo 3: pos:              0x1 flags:           100001/0x1
"""
TAIL = """\
(00.060282) Error (criu/cr-dump.c:1545): Dump files (pid: 20709) failed with -1
(00.079385) Error (criu/cr-dump.c:1975): Dumping FAILED.
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "(00.06) Dumping path for 3 fd via self 21 [/aa (deleted)]\n"
            "(00.06) Error (criu/files-reg.c:1122): Can't create link remap for /aa. Use link-remap option.\n",
            "process python3 (pid 20709), descriptor 3 (/aa (deleted)) holds the open file /aa, whose name was removed "
            "while the file has another",
        ),
        (
            "(00.05) Error (criu/sk-inet.c:185): inet: In-flight connection (l) for b026\n"
            "(00.05) Error (criu/sk-inet.c:186): inet: In-flight connections can be ignored with the --skip\n",
            "process python3 (pid 20709), descriptor 3 holds a TCP connection that the listening program has not "
            "accepted yet",
        ),
        (
            "(10.04) Error (criu/cr-dump.c:1655): Timeout reached. Try to interrupt: 0\n",
            "process python3 (pid 20709), descriptor 3 holds a process that does not stop: it waits in the kernel, for "
            "a child after vfork or for a file system",
        ),
    ],
)
def test_what_cannot_be_saved_is_named_by_process_and_descriptor(lines: str, message: str) -> None:
    error = explain(HEAD + lines + TAIL, "checkpoint", "criu failed", Path("dump.log"))
    assert isinstance(error, Refused)
    assert error.message == message
    assert error.hint


def test_an_unknown_error_is_quoted_with_its_place() -> None:
    log = HEAD + "(00.06) Error (criu/new.c:1): Something unheard of\n" + TAIL
    error = explain(log, "checkpoint", "criu failed", Path("/p/dump.log"))
    assert type(error) is MoorageError
    assert error.message == (
        "CRIU's checkpoint failed: process python3 (pid 20709), descriptor 3: Something unheard of"
    )
    assert error.hint == "see /p/dump.log"


def test_a_lack_of_the_machine_is_told_apart() -> None:
    log = HEAD + "(00.06) Error (criu/cr-dump.c:1): Can't get rlimit 0: Operation not permitted\n"
    error = explain(log, "checkpoint", "", Path("dump.log"))
    assert isinstance(error, EnvironmentLacking)
    assert "CAP_SYS_RESOURCE" in error.message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("File tmp/data has bad size 5 (expect 100)", "the file tmp/data has 5 bytes here and had 100"),
        ("File usr/lib/x.so has bad build-ID", "usr/lib/x.so is another version here"),
    ],
)
def test_a_restore_names_the_file_that_differs(line: str, words: str) -> None:
    log = f"(00.03)      7: Error (criu/files-reg.c:1): {line}\n(00.05) Error (criu/x.c:1): Restoring FAILED.\n"
    error = explain(log, "restore", "", Path("restore.log"))
    assert type(error) is MoorageError
    assert words in error.message
    assert next(findings(log)).pid == 7


@pytest.mark.parametrize("log", ["", HEAD, TAIL, "garbage \x00\n"])
def test_without_an_explanation_runcs_words_are_used(log: str) -> None:
    error = explain(log, "restore", "criu failed: type NOTIFY errno 0", Path("restore.log"))
    assert error.message == "CRIU's restore failed: criu failed: type NOTIFY errno 0"


def test_runcs_last_error_is_taken_from_its_log() -> None:
    log = (
        '{"level":"warning","msg":"lots"}\n'
        '{"level":"error","msg":"runc run failed: unable to start container process: exec: no such file"}\nnot json\n'
    )
    assert last_words(log) == "exec: no such file"
    assert last_words("") == ""
