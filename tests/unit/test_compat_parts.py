"""What a fingerprint is made of: processor flags, loaded libraries, the model, digests, GPUs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.compat import digests, features, gpu, loaded, machine, model
from moorage.compat.digests import Digests
from moorage.errors import UsageError

SITE = "/opt/v/lib/python3.12/site-packages"


def test_flags_of_the_kernel_do_not_count_and_unknown_ones_do() -> None:
    rich = features.visible("fpu sse2 avx2 avx512f pti ibrs hypervisor rep_good brand_new")
    assert rich == ("avx2", "avx512f", "brand_new", "fpu", "sse2")
    assert features.lacking(rich, features.visible("fpu sse2 avx2 md_clear")) == ("avx512f", "brand_new")
    assert features.lacking(features.visible("fpu pti"), features.visible("fpu")) == ()


def test_the_first_processor_is_read() -> None:
    assert machine.cpu("processor\t: 0\nmodel name\t: A B\nflags\t\t: x y\n\nmodel name : C\n") == ("A B", "x y")
    assert machine.cpu("processor : 0\nFeatures : fp asimd\n") == ("", "fp asimd")


def test_mapped_files_are_those_of_a_disk() -> None:
    text = """\
7f00-7f01 r-xp 00000000 08:01 12   /usr/lib/libc.so.6
7f01-7f02 rw-p 00000000 00:00 0
7f02-7f03 rw-p 00000000 00:00 0    [heap]
7f03-7f04 rw-s 00000000 00:01 3    /memfd:x (deleted)
7f04-7f05 rw-s 00000000 00:01 3    /dev/shm/a
7f05-7f06 r--p 00000000 08:01 13   /data/a file with spaces
7f06-7f07 r--p 00000000 08:01 13   /gone (deleted)
"""
    assert loaded.mapped(text) == {"/usr/lib/libc.so.6", "/data/a file with spaces"}


@pytest.mark.parametrize(
    ("path", "engine", "package"),
    [
        (f"{SITE}/vllm/_C.abi3.so", "vLLM", "vllm"),
        (f"{SITE}/sgl_kernel/common_ops.abi3.so", "SGLang", "sglang"),
        (f"{SITE}/tensorrt_llm/libs/libtensorrt_llm.so", "TensorRT-LLM", "tensorrt_llm"),
        (f"{SITE}/jaxlib/_jax.so", "JAX", "jax"),
        (f"{SITE}/tokenizers/tokenizers.abi3.so", "transformers", "transformers"),
        ("/usr/lib/python3/dist-packages/torch/lib/libtorch_cpu.so", "torch", "torch"),
    ],
)
def test_an_engine_is_told_by_what_is_loaded(path: str, engine: str, package: str) -> None:
    hit = loaded.engine([f"{SITE}/zlib/z.so", path, "/usr/z/site-packages/torch/lib/libc10.so"])
    assert hit is not None and (hit.name, hit.package, hit.library) == (engine, package, path)


def test_what_is_not_loaded_is_no_engine() -> None:
    assert loaded.engine(["/usr/lib/libc.so.6", "/opt/vllm/readme.so"]) is None
    both = [f"{SITE}/vllm/_C.abi3.so", f"{SITE}/torch/lib/libc10.so"]
    torch = loaded.torch(both)
    assert torch is not None and torch.folder == SITE


def test_versions_come_from_metadata_folders() -> None:
    entries = ["torch-2.9.0+cu130.dist-info", "torch_sim-1.0.dist-info", "nvidia_nccl_cu13-2.28.9.dist-info", "torch"]
    entries += ["nvidia_cuda_runtime-13.0.48.dist-info", "Vllm-0.11.0.dist-info"]
    assert loaded.version_in("torch", entries) == "2.9.0+cu130"
    assert loaded.version_in("nccl", entries) == "2.28.9"
    assert loaded.version_in("cuda", entries) == "13.0.48"
    assert loaded.version_in("vllm", entries) == "0.11.0"
    assert loaded.version_in("jax", entries) == ""


def test_libraries_outside_of_packages_tell_their_version_by_name() -> None:
    nccl = loaded.library("nccl", ["/usr/lib/libnccl.so.2.27.3"])
    assert nccl is not None and (nccl.version, nccl.folder) == ("2.27.3", "")
    bundled = loaded.library("nccl", [f"{SITE}/nvidia/nccl/lib/libnccl.so.2"])
    assert bundled is not None and (bundled.version, bundled.folder) == ("", SITE)
    assert loaded.library("cuda", ["/usr/lib/libcudart.so.12.8.90"]) is not None
    assert loaded.library("cuda", ["/usr/lib/libcuda.so.1"]) is None


def test_c_libraries_are_known() -> None:
    paths = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2", "/lib/ld-musl-x86_64.so.1"]
    assert all(loaded.is_libc(path) for path in [*paths, "/lib/libc-2.31.so"])
    assert not any(loaded.is_libc(path) for path in ("/lib/libcap.so.2", "/lib/libcrypt.so.1", "/x/libc10.so"))


def test_the_model_is_named_by_owner_flag_or_files() -> None:
    env = {"HOME": "/home/a"}
    assert model.find([["python", "x.py"]], env, []) is None
    named = model.find([["python", "--model", "/models/m"]], env, [], label="/models/own")
    assert named == ("/models/own", "", ("/models/own",))
    hub = "/home/a/.cache/huggingface/hub/models--org--m/snapshots/"
    served = [["python3", "/usr/bin/vllm", "serve", "org/m", "--revision", "r1"]]
    assert model.find(served, env, []) == ("org/m", "r1", (f"{hub}r1",))
    assert model.find([["sglang", "--model-path=org/m"]], {"HF_HOME": "/h"}, []) == (
        "org/m",
        "",
        ("/h/hub/models--org--m/snapshots/",),
    )
    by_file = model.find([[]], env, ["/c/models--org--m/snapshots/r2/model.safetensors", "/lib/x.so"])
    assert by_file == ("org/m", "r2", ("/c/models--org--m/snapshots/r2",))
    assert model.find([[]], env, ["/m/w.gguf"]) == ("/m", "", ("/m",))


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    long_ago = time.time_ns() - 10_000_000_000
    known = Digests(tmp_path / "known")
    fresh = digest(known, path)
    assert known.read_bytes == 1000
    # Changed just now: it is read again, because a change in the same tick would leave no trace.
    assert digest(known, path) == fresh and known.read_bytes == 2000
    settled = SettledDigests(tmp_path / "known", long_ago)
    assert digest(settled, path) == digest(settled, path) == fresh and settled.read_bytes == 1000
    settled.save()
    again = Digests(tmp_path / "known")
    assert digest(again, path) == fresh and again.read_bytes == 0
    assert (tmp_path / "known").stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"x" * 999 + b"y")
    assert digest(again, path) != fresh


class SettledDigests(Digests):
    """As if its files had been changed long ago."""

    def __init__(self, file: Path, _: int) -> None:
        super().__init__(file)

    def of(self, fd: int, *, sampled: bool = False) -> tuple[int, str]:
        fresh, digests._FRESH_NS = digests._FRESH_NS, -(10**18)  # type: ignore[misc]
        try:
            return super().of(fd, sampled=sampled)
        finally:
            digests._FRESH_NS = fresh  # type: ignore[misc]


def digest(known: Digests, path: Path, *, sampled: bool = False) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return known.of(fd, sampled=sampled)[1]
    finally:
        os.close(fd)


def test_a_very_large_live_file_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(digests.SAMPLED_ABOVE + 1)
    before = digest(Digests(), path, sampled=True)
    assert before.startswith("sampled:")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert digest(Digests(), path, sampled=True) != before


class FakeNvml(SimpleNamespace):
    """What NVML says on a node with two GPUs; ``fails``: the driver does not answer."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(fails=fails, ended=0)

    def nvmlInit(self) -> None:
        if self.fails:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:
        self.ended += 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=150 << 30)


def test_gpus_come_from_nvml_or_from_the_driver_s_files(tmp_path: Path) -> None:
    nvml = FakeNvml()
    facts = gpu.look(nvml=nvml, proc=tmp_path)
    assert (facts.driver, facts.cuda, nvml.ended) == ("580.95.05", "13.0", 1)
    assert [(g.model, g.memory_bytes, g.uuid) for g in facts.gpus] == [
        ("NVIDIA H200", 150 << 30, "GPU-0"),
        ("NVIDIA H200", 150 << 30, "GPU-1"),
    ]
    assert gpu.look(proc=tmp_path) == gpu.GpuFacts()
    (tmp_path / "gpus" / "0000:01").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    (tmp_path / "gpus" / "0000:01" / "information").write_text("Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-9\n")
    facts = gpu.look(nvml=FakeNvml(fails=True), proc=tmp_path)
    assert (facts.driver, [(g.model, g.uuid) for g in facts.gpus]) == ("580.95.05", [("NVIDIA H200", "GPU-9")])


def test_this_machine_has_a_fingerprint(tmp_path: Path) -> None:
    found = machine.look()
    assert found.architecture and found.kernel and found.moorage and found.cpu_features
    (tmp_path / "n1.json").write_text('{"kernel": "5.4.0", "cpu_features": ["sse2"]}')
    environ = {machine.OVERRIDES: str(tmp_path)}
    other = machine.look("n1", environ=environ)
    assert (other.kernel, other.cpu_features, other.architecture) == ("5.4.0", ("sse2",), found.architecture)
    assert machine.look("n2", environ=environ) == found
    (tmp_path / "n1.json").write_text('{"kernel": 3}')
    with pytest.raises(UsageError, match=r"n1\.json"):
        machine.look("n1", environ=environ)
