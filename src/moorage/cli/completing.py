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


def node_names(incomplete: str) -> list[str]:
    """Nodes."""
    return _names(lambda api: [node.node for node in api.nodes()], incomplete)
