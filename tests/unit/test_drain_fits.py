"""What keeps a job off a node, asked for a whole fleet at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from moorage.compat import Gpu, NodeFingerprint
from moorage.coordinator.capacity import Need, has
from moorage.coordinator.drain import fleet
from moorage.coordinator.drain.model import JobView, NodeView
from moorage.coordinator.drain.plan import plan


def _leader(kinds: dict[str, NodeFingerprint]) -> Any:
    records = {name: SimpleNamespace(fingerprint=msgspec.to_builtins(kind)) for name, kind in kinds.items()}
    return SimpleNamespace(nodes=SimpleNamespace(known=records))


def test_hundreds_of_nodes_are_judged_by_kind_and_only_those_that_fit_are_chosen() -> None:
    kinds = {
        f"n{number:03}": NodeFingerprint(
            architecture="x86_64" if number % 2 else "aarch64",
            kernel="6.1",
            cpu_features=tuple(f"f{n}" for n in range(100)),
            gpus=(Gpu(model="H200", memory_bytes=1 << 37, uuid=f"GPU-{number}"),),
        )
        for number in range(500)
    }
    fits = fleet.fits(_leader(kinds))
    nodes = [NodeView(node=name, has=has(slots=8, gpus=8, cpus=64, memory=1 << 40)) for name in kinds]
    jobs = [
        JobView(job=f"j{number:04}", name=f"j{number}", seats=(f"n{number % 500:03}",), need=Need(gpus=1))
        for number in range(2000)
    ]
    found = plan(nodes, jobs, [f"n{number:03}" for number in range(50)], parallel=10, fits=fits)
    assert len(found.moves) == 200 and not found.stuck
    assert all(int(move.source[0][1:]) % 2 == int(move.target[0][1:]) % 2 for move in found.moves)
