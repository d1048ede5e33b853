"""The installed command `moorage`, as a person at a shell meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moorage.errors import MoorageError
from tests.support.cluster import DevCluster

COMMAND = Path(sys.executable).with_name("moorage")


class Shell:
    """Runs `moorage` against a cluster, in a folder."""

    def __init__(self, cluster: DevCluster, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.environment = {**os.environ, **cluster.environment, **(environment or {})}

    def __call__(
        self, *arguments: str, code: int = 0, given: str = "", timeout: float = 180
    ) -> subprocess.CompletedProcess[str]:
        """Run one command; it must end with ``code``, and whatever happens no stack trace is shown."""
        done = subprocess.run(
            [str(COMMAND), *arguments],
            cwd=self.folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        """What a program reads of it."""
        at = arguments.index("--") if "--" in arguments else len(arguments)
        line = (*arguments[:at], "--output", "json", *arguments[at:])
        return json.loads(self(*line, code=code).stdout)

    def lines(self, *arguments: str) -> list[Any]:
        """What a program reads where each line is an object."""
        return [json.loads(line) for line in self(*arguments, "--output", "json").stdout.splitlines()]

    def refused(self, error: type[MoorageError], *arguments: str) -> str:
        """What is said to a request that cannot be met: the line, and the line with the way out if there is one."""
        done = self(*arguments, code=error.exit_code)
        said = done.stderr.splitlines()
        # What a person at a terminal is told on the way comes before.
        at = next((n for n, line in enumerate(said) if line.startswith("moorage: ")), None)
        assert at is not None and len(said) - at <= 2, done.stderr
        return "\n".join(said[at:])
