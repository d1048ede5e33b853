"""For all tests: what a machine lacks is a skip with its reason, and nothing may be left behind."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
from pathlib import Path

import pytest

from moorage.errors import EnvironmentLacking
from moorage.runtime import programs
from tests.support import leftovers, removal


@functools.cache
def _lacks_root() -> str:
    if os.geteuid() != 0:
        return "needs root"
    try:
        for program in ("criu", "runc", "etcd", "nft", "ip"):
            programs.find(program)
    except EnvironmentLacking as error:
        return str(error)
    return ""


@functools.cache
def _lacks_gpu() -> str:
    return "" if Path("/dev/nvidiactl").exists() else "needs an NVIDIA GPU and its driver"


@functools.cache
def _lacks_torch() -> str:
    return "" if importlib.util.find_spec("torch") else "needs torch (`make test` installs it)"


@functools.cache
def _lacks_ray() -> str:
    return "" if importlib.util.find_spec("ray") else "needs Ray (`make test-examples` installs it)"


_LACKS = {"root": _lacks_root, "gpu": _lacks_gpu, "torch": _lacks_torch, "ray": _lacks_ray}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, lacks in _LACKS.items():
            if item.get_closest_marker(mark) and (reason := lacks()):
                item.add_marker(pytest.mark.skip(reason=reason))
    # What takes long because it waits begins first; files stay whole, for what their tests share.
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


_WATCH = pytest.StashKey[leftovers.Watch]()
_LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Looks at the machine before anything is made: once for the whole run, however many processes it has."""
    if hasattr(session.config, "workerinput"):
        return  # one of several: the process that started it judges
    token = secrets.token_hex(8)
    os.environ[leftovers.TOKEN_VARIABLE] = token
    folder: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    os.environ[leftovers.MADE_VARIABLE] = str(folder / "made")
    session.config.stash[_WATCH] = leftovers.Watch(token, folder)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if it left a process, mount, namespace, link, cgroup or table on the machine.

    Comes after the processes of a parallel run have ended. What is left is removed; a run that was broken off had no
    time to.
    """
    if (watch := session.config.stash.get(_WATCH, None)) is None:
        return
    if session.exitstatus == pytest.ExitCode.INTERRUPTED:
        removal.remove(watch.token, watch.folder)
    elif left := watch.leftovers():
        session.config.stash[_LEFT] = left
        removal.remove(watch.token, watch.folder)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, None):
        terminalreporter.section("left behind by the tests, now removed", red=True)
        terminalreporter.write("".join(f"  {entry}\n" for entry in left))
