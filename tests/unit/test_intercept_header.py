"""What the generator of the libcuda proxy reads from cuda.h, and what it writes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2] / "native" / "intercept"
DECLARED = """
CUresult cuInit(unsigned int Flags);
CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, int *status);
CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize);
CUresult cuStreamSynchronize(CUstream hStream);
CUresult cuStreamSynchronize_ptsz(CUstream hStream);
CUresult cuCtxSynchronize(void);
CUresult
cuThing(const CUstruct *const params, unsigned int values[4]);
static inline CUresult cuInline(int a) { return 0; }
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"intercept_{name}", ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


header = load("header")


def test_every_declaration_is_a_function_with_its_types() -> None:
    found = {function.name: function.types for function in header.functions(DECLARED)}
    assert found["cuMemAlloc_v2"] == ("CUdeviceptr *", "size_t")
    assert found["cuCtxSynchronize"] == ()
    assert found["cuThing"] == ("const CUstruct *const", "unsigned int *")
    assert "cuInline" not in found


def test_a_parameter_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(header.HeaderError, match="cuOdd"):
        header.functions(DECLARED + "CUresult cuOdd(void (*callback)(int));")


def test_two_declarations_that_differ_are_an_error() -> None:
    with pytest.raises(header.HeaderError, match="twice"):
        header.functions(DECLARED + "CUresult cuInit(int a);")


def test_a_header_without_the_versioned_names_is_an_error() -> None:
    with pytest.raises(header.HeaderError, match="cuStreamSynchronize_ptsz"):
        header.functions(DECLARED.replace("cuStreamSynchronize_ptsz", "cuOther"))


def test_versions_pair_the_lists_of_both_headers(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text("#define cuGraphInstantiate      cuGraphInstantiateWithFlags\n")
    (tmp_path / "cudaTypedefs.h").write_text(
        "typedef CUresult (CUDAAPI *PFN_cuMemAlloc_v3020)(int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuMemAlloc_v2000)(int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuWait_v7000_ptsz)(int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuGraphInstantiate_v12000)(int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuUnclear_v2000)(int);\n"
    )
    known = {"cuMemAlloc", "cuMemAlloc_v2", "cuWait_ptsz", "cuGraphInstantiateWithFlags", "cuUnclear", "cuUnclear_v2"}
    found = {(v.base, v.since, v.flavour): v.symbol for v in header.versions(tmp_path / "cuda.h", known)}
    assert found == {
        ("cuMemAlloc", 2000, ""): "cuMemAlloc",
        ("cuMemAlloc", 3020, ""): "cuMemAlloc_v2",
        ("cuWait", 7000, "_ptsz"): "cuWait_ptsz",
        ("cuGraphInstantiate", 12000, ""): "cuGraphInstantiateWithFlags",
    }


def test_a_class_for_a_function_that_the_header_lacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text(f"typedef int CUresult;\n{DECLARED}")
    (tmp_path / "cudaTypedefs.h").write_text("")
    (tmp_path / "classes.txt").write_text("wait? cuNotThere\nhook cuGone\n")
    command = [sys.executable, f"{ROOT}/generate.py", "--header", f"{tmp_path}/cuda.h", "--compiler", "c++"]
    command += ["--classes", f"{tmp_path}/classes.txt", "--out", f"{tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "classes, line 2: the header has no function cuGone" in done.stderr
