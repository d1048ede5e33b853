"""``moorage runtime install``: runs the installer, a shell script that also works before moorage is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from moorage.errors import EnvironmentLacking

SCRIPT = Path(__file__).with_name("install.sh")


def install(
    *,
    prefix: Path | str | None = None,
    sources: Path | str | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Lay the programs under ``prefix`` (default ``$MOORAGE_RUNTIME``, else /opt/moorage/runtime).

    ``sources`` is an apt source file to take them from, ``force`` builds anew what is there. ``progress`` is given
    every line that the script prints. Raises `EnvironmentLacking` with the script's own words.
    """
    command = ["bash", str(SCRIPT)]
    command += ["--prefix", str(prefix)] if prefix else []
    command += ["--sources", str(sources)] if sources else []
    command += ["--force"] if force else []
    last = "no message"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        assert script.stdout is not None
        for line in script.stdout:
            last = line.strip().removeprefix("moorage runtime: ") or last
            progress(last)
    if script.returncode:
        raise EnvironmentLacking(f"the runtime's programs cannot be installed: {last}", "see docs/install.md")
