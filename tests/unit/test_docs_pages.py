"""Pages that are made from the code are current, and the table of exit codes keeps its promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moorage.errors import exit_codes

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_made_from_the_code_are_current() -> None:
    command = [sys.executable, ROOT / "tools/docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_has_an_exit_code_of_its_own_from_200_up() -> None:
    codes = [code for code, _, _ in exit_codes()]
    assert len(set(codes)) == len(codes) and min(codes) == 200 and max(codes) < 256
