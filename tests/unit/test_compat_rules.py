"""Every rule of the table: what differs is refused in words that name it, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.compat import (
    RULES,
    FileMark,
    Found,
    Gpu,
    JobFingerprint,
    ModelMark,
    MountMark,
    NodeFingerprint,
    Package,
    job_from,
    judge,
    node_from,
)
from moorage.compat.fingerprint import SeenFile
from moorage.compat.rules import table

H200 = Gpu(model="NVIDIA H200", memory_bytes=150 << 30, uuid="GPU-1")
NODE = NodeFingerprint(
    architecture="x86_64",
    kernel="6.12.8-amd64",
    cpu="Xeon",
    cpu_features=("avx", "avx2", "avx512f", "sse2"),
    libc="glibc 2.41",
    criu="4.2.1",
    runc="1.3.6",
    driver="580.95.05",
    cuda="13.0",
    gpus=(H200, msgspec.structs.replace(H200, uuid="GPU-2")),
)
SITE = "/opt/venv/lib/python3.12/site-packages"
LIBC = FileMark(path="/usr/lib/x86_64-linux-gnu/libc.so.6", size=2000, digest="c" * 64)
LIBRARY = FileMark(path="/opt/lib/libwork.so", size=100, digest="a" * 64)
CONFIG = FileMark(path="/models/m/config.json", size=10, digest="d" * 64)
JOB = JobFingerprint(
    node=NODE,
    gpus=(H200,),
    engine=Package(name="vLLM", version="0.11.0", folder=SITE),
    torch=Package(name="torch", version="2.9.0", folder=SITE),
    cuda=Package(name="CUDA runtime", version="13.0.48", folder=SITE),
    nccl=Package(name="NCCL", version="2.28.9", folder=SITE),
    model=ModelMark(name="org/m", revision="abc", index=(CONFIG,)),
    mounts=(MountMark(source="/data", destination="/data"),),
    files=(LIBC, LIBRARY),
)
FOUND = Found(
    files={mark.path: SeenFile(size=mark.size, digest=mark.digest) for mark in (LIBC, LIBRARY, CONFIG)},
    packages={"engine": "0.11.0", "torch": "2.9.0", "cuda": "13.0.48", "nccl": "2.28.9"},
    sources=("/data",),
)


def test_an_equal_node_fits_and_every_rule_says_something() -> None:
    verdict = judge(JOB, msgspec.structs.replace(NODE, kernel="6.12.9"), FOUND)
    assert verdict.fits, verdict.summary
    assert {line.rule for line in verdict.lines} == {rule.name for rule in RULES}


def node(**changes: Any) -> tuple[JobFingerprint, NodeFingerprint, Found]:
    return JOB, msgspec.structs.replace(NODE, **changes), FOUND


def found(**changes: Any) -> tuple[JobFingerprint, NodeFingerprint, Found]:
    return JOB, NODE, msgspec.structs.replace(FOUND, **changes)


def file(mark: FileMark, seen: SeenFile | None) -> tuple[JobFingerprint, NodeFingerprint, Found]:
    files = {path: known for path, known in FOUND.files.items() if path != mark.path}
    return found(files=files if seen is None else {**files, mark.path: seen})


def image() -> tuple[JobFingerprint, NodeFingerprint, Found]:
    return msgspec.structs.replace(JOB, image="/images/a"), NODE, msgspec.structs.replace(FOUND, image=False)


GIB_150 = "1 x NVIDIA H200 150 GiB"


@pytest.mark.parametrize(
    ("rule", "case", "message"),
    [
        (
            "gpu",
            node(gpus=(Gpu(model="NVIDIA H100", memory_bytes=80 << 30),)),
            f"the pod used {GIB_150}, the node has 1 x NVIDIA H100 80 GiB",
        ),
        ("gpu", node(gpus=()), f"the pod used {GIB_150}, the node has none"),
        (
            "gpu",
            node(gpus=(Gpu(model="NVIDIA H200", memory_bytes=140 << 30),)),
            f"the pod used {GIB_150}, the node has 1 x NVIDIA H200 140 GiB",
        ),
        ("driver", node(driver="570.1"), "the GPU driver is 570.1 there, and was 580.95.05"),
        (
            "engine",
            found(packages={**FOUND.packages, "engine": "0.10.2"}),
            "vLLM is vLLM 0.10.2 there, and was vLLM 0.11.0",
        ),
        (
            "model",
            file(CONFIG, SeenFile(size=10, digest="e" * 64)),
            f"model org/m@abc: /models/m/config.json has other content there (BLAKE3 {'e' * 16}…, and was {'d' * 16}…)",
        ),
        ("architecture", node(architecture="aarch64"), "the architecture is aarch64 there, and was x86_64"),
        (
            "cpu",
            node(cpu="Atom", cpu_features=("avx", "sse2", "new")),
            "the processor there (Atom) lacks avx2, avx512f",
        ),
        ("kernel", node(kernel="6.1.0"), "the kernel is 6.1.0 there, older than 6.12.8-amd64"),
        ("criu", node(criu="4.1"), "CRIU is 4.1 there, older than 4.2.1"),
        ("runc", node(runc="1.2.9"), "runc is 1.2.9 there, older than 1.3.6"),
        ("libc", node(libc="glibc 2.36"), "the C library is glibc 2.36 there, and was glibc 2.41"),
        (
            "libc",
            file(LIBC, SeenFile(size=2000, digest="b" * 64)),
            f"{LIBC.path} has other content there (BLAKE3 {'b' * 16}…, and was {'c' * 16}…)",
        ),
        ("cuda", node(cuda="12.8"), "the driver there serves CUDA 12.8, the pod uses 13.0.48"),
        (
            "cuda",
            found(packages={**FOUND.packages, "cuda": "12.8.90"}),
            "CUDA runtime is CUDA runtime 12.8.90 there, and was CUDA runtime 13.0.48",
        ),
        (
            "torch",
            found(packages={key: value for key, value in FOUND.packages.items() if key != "torch"}),
            "torch is not installed there, and was torch 2.9.0",
        ),
        (
            "nccl",
            found(packages={**FOUND.packages, "nccl": "2.27.3"}),
            "NCCL is NCCL 2.27.3 there, and was NCCL 2.28.9",
        ),
        ("image", image(), "the image /images/a is not there"),
        ("mounts", found(sources=()), "/data, which the pod sees as /data, is not there"),
        ("files", file(LIBRARY, None), "/opt/lib/libwork.so is not there"),
        ("files", file(LIBRARY, SeenFile(size=101)), "/opt/lib/libwork.so has 101 bytes there, and had 100"),
        (
            "files",
            file(LIBRARY, SeenFile(size=100, digest="b" * 64)),
            f"/opt/lib/libwork.so has other content there (BLAKE3 {'b' * 16}…, and was {'a' * 16}…)",
        ),
    ],
)
def test_a_mismatch_is_told_by_its_name(
    rule: str, case: tuple[JobFingerprint, NodeFingerprint, Found], message: str
) -> None:
    verdict = judge(*case)
    assert [(line.rule, line.message) for line in verdict.misfits] == [(rule, message)]
    assert not verdict.fits and verdict.summary == message


def test_every_rule_has_a_mismatch_above() -> None:
    mark = next(m for m in test_a_mismatch_is_told_by_its_name.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == {rule.name for rule in RULES}


def test_newer_is_not_older() -> None:
    newer = msgspec.structs.replace(NODE, kernel="7.0", criu="5.0", runc="2.0", cpu_features=(*NODE.cpu_features, "x"))
    assert judge(JOB, newer, FOUND).fits


def test_a_job_without_gpus_does_not_ask_for_any() -> None:
    job = msgspec.structs.replace(JOB, gpus=(), cuda=None)
    bare = msgspec.structs.replace(NODE, gpus=(), driver="", cuda="")
    verdict = judge(job, bare, FOUND)
    assert verdict.fits
    assert {line.rule for line in verdict.lines if line.state == "unused"} >= {"gpu", "driver", "cuda", "image"}


def test_what_is_not_known_is_not_compared() -> None:
    verdict = judge(JOB, NODE)
    assert verdict.fits
    assert {line.rule for line in verdict.lines if line.state == "not compared"} >= {"engine", "model", "files"}
    assert judge(JobFingerprint(), NodeFingerprint()).fits
    # What an earlier version wrote, and what cannot be read.
    assert job_from({"kernel": "6.1", "cpu_flags": "avx"}) == JobFingerprint()
    assert node_from({"gpus": 3}) == NodeFingerprint()


def test_what_the_checkpoint_carries_itself_is_not_asked_of_the_node() -> None:
    job = msgspec.structs.replace(JOB, engine=Package(name="vLLM", version="0.11.0", folder=SITE, carried=True))
    none = {key: value for key, value in FOUND.packages.items() if key != "engine"}
    assert judge(job, NODE, msgspec.structs.replace(FOUND, packages=none)).fits


def test_a_long_story_is_cut() -> None:
    many = tuple(FileMark(path=f"/lib/{n}", size=1, digest="x") for n in range(50))
    verdict = judge(msgspec.structs.replace(JOB, files=many), NODE, FOUND)
    assert len(verdict.misfits) == 50 and verdict.summary.endswith("; and 44 more")


def test_the_table_can_be_read() -> None:
    text = table()
    for rule in RULES:
        assert f"| {rule.name} |" in text and rule.reason in text and rule.cure in text
    assert text.count("rule of four") == 4
