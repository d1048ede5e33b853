"""The Python API: `Client` (blocking) and `AsyncClient` mirror the command line's verbs.

>>> from moorage import Client
>>> client = Client()
>>> job = client.torchrun("train.py", nnodes=2, nproc_per_node=8)
>>> checkpoint = job.checkpoint()
>>> job.restore(checkpoint, on=["node-c", "node-d"])
>>> job.wait().exit_code
"""

from __future__ import annotations

from moorage import quiet_grpc  # noqa: F401  # isort: skip  # first: all that follows imports gRPC
from moorage.coordinator.client.aio import AsyncClient, AsyncJob
from moorage.coordinator.client.drains import DrainInfo, MoveInfo
from moorage.coordinator.client.models import (
    AttemptInfo,
    CheckpointInfo,
    EventInfo,
    JobInfo,
    LogLine,
    NodeInfo,
    PodInfo,
    RankInfo,
)
from moorage.coordinator.client.spec import job_spec, torchrun_spec
from moorage.coordinator.client.sync import Client, Job

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AttemptInfo",
    "CheckpointInfo",
    "Client",
    "DrainInfo",
    "EventInfo",
    "Job",
    "JobInfo",
    "LogLine",
    "MoveInfo",
    "NodeInfo",
    "PodInfo",
    "RankInfo",
    "job_spec",
    "torchrun_spec",
]
