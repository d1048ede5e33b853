"""What a shell completes beyond commands and flags: names that the cluster knows. Silent when it cannot be asked."""

from __future__ import annotations

from collections.abc import Callable

from moorage.errors import MoorageError

#: A person waits for this at the prompt.
_PATIENCE_SECONDS = 1.0


def _names(ask: Callable[..., list[str]], incomplete: str) -> list[str]:
    from moorage.cli.options import client

    try:
        with client(patience=_PATIENCE_SECONDS) as api:
            return [name for name in ask(api) if name.startswith(incomplete)]
    except (MoorageError, OSError):
        return []


def job_names(incomplete: str) -> list[str]:
    """Jobs that are not over, by name."""
    return _names(lambda api: [job.name or job.id for job in api.jobs()], incomplete)


def all_job_names(incomplete: str) -> list[str]:
    """Jobs by name, also those that are over."""
    return _names(lambda api: list(dict.fromkeys(job.name or job.id for job in api.jobs(all=True))), incomplete)


def node_names(incomplete: str) -> list[str]:
    """Nodes."""
    return _names(lambda api: [node.node for node in api.nodes()], incomplete)


def node_list(incomplete: str) -> list[str]:
    """Nodes with commas between them: the last one is completed, with none that stands there already."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in node_names(last) if name not in before.split(",")]


def checkpoint_ids(incomplete: str) -> list[str]:
    """Committed checkpoints."""
    return _names(lambda api: [checkpoint.id for checkpoint in api.checkpoints()], incomplete)


def things(incomplete: str) -> list[str]:
    """What `moorage show` shows: jobs, nodes, checkpoints."""
    return [name for ask in (all_job_names, node_names, checkpoint_ids) for name in ask(incomplete)]
