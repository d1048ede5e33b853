"""Pages that are made from the code are current, and the table of exit codes keeps its promises."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moorage.errors import exit_codes

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_made_from_the_code_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools/docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_has_an_exit_code_of_its_own_from_200_up() -> None:
    codes = [code for code, _, _ in exit_codes()]
    assert len(set(codes)) == len(codes) and min(codes) == 200 and max(codes) < 256


def _error_table() -> Any:
    spec = importlib.util.spec_from_file_location("error_table", ROOT / "tools" / "error_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["error_table"] = module
    spec.loader.exec_module(module)
    return module


def test_every_message_leads_to_a_cure() -> None:
    table = _error_table()
    assert set(table.CURES) <= {name for _, name, _ in exit_codes()}
    found = table.raised()
    assert len(found) > 500 and all(one.cure or table.CURES.get(one.kind, table.RELAYED) for one in found)


def _code() -> Iterator[tuple[str, ast.Module]]:
    """All modules of moorage itself, wherever in the tree they lie."""
    apart = {"tests", "tools", "bench", "examples", "docs", "build", "native", "packaging"}
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT)
        if inside.parts[0] not in apart and not inside.parts[0].startswith(".") and path.name != "errors.py":
            yield str(inside), ast.parse(path.read_text())


def test_every_error_that_the_code_makes_is_in_the_table_of_cures() -> None:
    table = _error_table()
    kinds = {name for _, name, _ in exit_codes()}
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = table.sites()
    missing, looked = [], 0
    for file, tree in _code():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert not bases & kinds, f"{file}:{node.lineno}: errors.py has all classes of errors"
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in kinds:
                continue
            looked += 1
            rows = listed.get((file, node.lineno), [])
            if not rows or any(f"| {table._cell(row.message)} |" not in page for row in rows):
                missing.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert looked > 500 and not missing, ("run `make docs`", missing)


def test_every_page_that_is_linked_is_there() -> None:
    import re

    for page in [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and "…" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_python_api_is_described_name_by_name() -> None:
    from moorage.coordinator import client

    page = (ROOT / "docs" / "python-api.md").read_text()
    assert not [name for name in client.__all__ if f"\n## {name}\n" not in page], "run tools/docs.py"


def test_every_metric_is_in_the_operators_page() -> None:
    from moorage.coordinator.metrics import Metrics

    page = (ROOT / "docs" / "operations.md").read_text()
    names = {family.name for family in Metrics(lambda: None).registry.collect()}
    names |= {"moorage_node_pods", "moorage_node_ready", "moorage_node_registered", "moorage_node_lease_seconds"}
    names |= {"moorage_jobs", "moorage_nodes", "moorage_pods", "moorage_gpus", "moorage_drains_running"}
    missing = [name for name in names if name.startswith("moorage_") and name not in page]
    assert not missing, missing


def test_the_example_of_the_python_api_uses_every_verb() -> None:
    from moorage.coordinator.client import Client, Job

    tree = ast.parse((ROOT / "examples" / "python_api" / "example.py").read_text())
    used = {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    verbs = {
        name for one in (Client, Job) for name, what in vars(one).items() if callable(what) and not name.startswith("_")
    }
    assert verbs - used == {"close", "node_token", "remove_node"}  # `with` closes; what machines join with stays out
