"""Unchanged GPU programs, checkpointed while they work, killed, restored in fresh pods: results equal bit for bit.

Each prints one line of JSON, and with ``MOORAGE_GPU_RESULTS`` set writes it to ``programs.jsonl`` there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moorage.worker import gpu_host
from tests.support.cluster import DevCluster
from tests.support.gpu_jobs import PROGRAMS, disturbed, python, reference

pytestmark = [pytest.mark.gpu, pytest.mark.root]

PYTHON: dict[str, tuple[list[str], dict[str, str]]] = {
    "train": (["train.py", "--no-graph", "--steps", "1500", "--workers", "2"], {}),
    "train-graph": (["train.py", "--steps", "2000"], {}),
    "train-expandable": (["train.py", "--steps", "2000"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "train-compile": (["train.py", "--steps", "1500", "--no-graph", "--compile"], {}),
    "generate": (["generate.py"], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    "jax": (["with_jax.py"], {}),
    "cupy": (["with_cupy.py"], {}),
}
CUDA = sorted(path.stem for path in (PROGRAMS / "cuda").glob("*.cu"))
EXTRA = {"dynamic_parallelism": ["-rdc=true", "-lcudadevrt"], "two_contexts": ["-l:libcuda.so.1"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=10) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """The CUDA C++ programs; all are compiled by whoever needs one first."""
    folder = Path(tempfile.mkdtemp(prefix="moorage-cuda-", dir="/var/tmp"))
    folder.chmod(0o755)

    def build(name: str) -> None:
        command = [
            "nvcc",
            "-std=c++17",
            "-O2",
            "-arch=native",
            "-diag-suppress=177",
            str(PROGRAMS / "cuda" / f"{name}.cu"),
        ]
        command += ["-o", str(folder / name), f"-L{gpu_host.driver().libcuda.parent}", *EXTRA.get(name, [])]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(build, CUDA))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", list(PYTHON))
def test_a_python_program_goes_on_bit_for_bit(cluster: DevCluster, name: str) -> None:
    arguments, env = PYTHON[name]
    _goes_on(cluster, name, python(*arguments), env)


@pytest.mark.parametrize("name", CUDA)
def test_a_cuda_program_goes_on_bit_for_bit(cluster: DevCluster, built: Path, name: str) -> None:
    # Alone on the GPU (`make test-gpu` sees to it): after a driver restore, driver 580 answers Xid 109 when it has to
    # switch from a long kernel to another process's work.
    slow = name == "long_kernel"  # 8 kernels of 5 s each: every checkpoint meets one
    _goes_on(cluster, name.replace("_", "-"), [str(built / name), "640" if slow else "1500"], {}, most=1 if slow else 3)


def _goes_on(cluster: DevCluster, name: str, command: list[str], env: dict[str, str], most: int = 3) -> None:
    expected = reference(command, env)
    result = disturbed(cluster, name, command, env, most=most)
    measured = result.pop("moorage")
    nonces = {expected.pop("nonce"), result.pop("nonce")}
    line = json.dumps({"program": name, "equal": result == expected, "nonce_survived": True, **measured})
    print(line)
    if folder := os.environ.get("MOORAGE_GPU_RESULTS"):
        with (Path(folder) / "programs.jsonl").open("a") as file:
            file.write(line + "\n")
    assert len(nonces) == 2, "the two runs drew the same nonce"
    assert result == expected
