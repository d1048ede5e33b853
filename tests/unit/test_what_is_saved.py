"""The page is what the tests found: its rows are those of the programs and of the refusals that have a test."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tests.support import state_programs

_PAGE = state_programs.ROOT / "docs" / "what-is-saved.md"


def _tables(text: str) -> dict[str, list[list[str]]]:
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| ") and not line.startswith(("| program", "| what")):
            tables.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return tables


def test_the_committed_table_has_a_row_for_each_program_and_each_refusal() -> None:
    tables = _tables(_PAGE.read_text())
    titles = state_programs.titles()
    assert {row[0].strip("`"): row[1] for row in tables["Saved"]} == titles
    assert {row[2].partition(":")[0] for row in tables["Saved"]} <= {"kept", "not on this machine"}
    assert [row[0] for row in tables["Refused"]] == sorted(state_programs.REFUSED)


def test_the_page_is_made_of_the_results(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("what_is_saved", state_programs.ROOT / "tools" / "what_is_saved.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    programs = {
        "b": {"what": "of b", "result": "kept", "note": ""},
        "a": {"what": "of a", "result": "lost", "note": "x"},
    }
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    pods = {"c": {"what": "of c", "result": "kept", "note": ""}}
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    (tmp_path / "refusals.json").write_text(json.dumps({"raw": {"message": "no"}}))
    tables = _tables(tool.page(tmp_path))
    assert tables["Saved"] == [["`a`", "of a", "lost: x"], ["`b`", "of b", "kept"], ["`c`", "of c", "kept"]]
    assert tables["Refused"] == [["raw", "no"]]
