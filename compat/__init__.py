"""What a checkpoint needs of the node it is restored on: fingerprints, the table of rules, the verdict.

`fingerprint` holds the data, `rules` the table and its decisions (pure), `features` which CPU flags count (pure),
`loaded` and `model` what a job is made of (pure over paths and texts), `machine` and `gpu` look at a node, `digests`
reads files. Imports neither coordinator nor worker.
"""

from __future__ import annotations

from moorage.compat.fingerprint import (
    FileMark,
    Found,
    Gpu,
    JobFingerprint,
    ModelMark,
    MountMark,
    NodeFingerprint,
    Package,
    job_from,
    node_from,
)
from moorage.compat.rules import RULES, Line, Rule, Verdict, judge

__all__ = [
    "RULES",
    "FileMark",
    "Found",
    "Gpu",
    "JobFingerprint",
    "Line",
    "ModelMark",
    "MountMark",
    "NodeFingerprint",
    "Package",
    "Rule",
    "Verdict",
    "job_from",
    "judge",
    "node_from",
]
