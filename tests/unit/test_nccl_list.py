"""The list of NCCL's functions: what it is made from, and what is made from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native/intercept/nccl"

_HEADER = """
#define NCCL_MAJOR 2
/* ncclResult_t ncclCommented(int a); */
ncclResult_t  ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t pncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t  ncclSomethingNew(const void* buff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream);
"""


def test_a_function_that_is_not_listed_is_found(tmp_path: Path) -> None:
    (tmp_path / "nccl.h").write_text(_HEADER)
    command = [sys.executable, str(NATIVE / "declare.py"), "--include", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["ncclSomethingNew: int(void*, std::size_t, int, void*, void*), listed None"]


def test_all_that_the_list_has_is_exported_under_both_names(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(NATIVE / "generate.py"), "--out", str(tmp_path)], check=True)
    exported = (tmp_path / "exports.txt").read_text().split()
    assert len(exported) == len(set(exported)) == 193
    assert {"ncclAllReduce", "pncclAllReduce", "ncclCommWindowRegister", "ncclDevCommCreate"} <= set(exported)
