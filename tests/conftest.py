"""For all tests: what a machine lacks is a skip with its reason, and nothing may be left behind."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import EnvironmentLacking
from moorage.runtime import programs
from tests.support import leftovers


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


_LACKS = {"root": _lacks_root, "gpu": _lacks_gpu, "torch": _lacks_torch}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, lacks in _LACKS.items():
            if item.get_closest_marker(mark) and (reason := lacks()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the run if it left a process, mount, namespace, link, cgroup or table on the machine."""
    token = secrets.token_hex(8)
    os.environ[leftovers.TOKEN_VARIABLE] = token
    watch = leftovers.Watch(token, tmp_path_factory.getbasetemp())
    yield
    if left := watch.leftovers():
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)
