"""The barrier's decision, a pure function: what to do with the votes that there are."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Literal, TypeAlias

import msgspec

from moorage.records import AttemptStart, Outcome, OutcomeKind, Vote

Step: TypeAlias = Literal["captured", "persisted"]


class Tally(msgspec.Struct, frozen=True):
    """What one step's votes say: ``yes`` (every pod), ``no`` (``reason`` says why), or ``open`` (``missing`` pods)."""

    verdict: Literal["yes", "no", "open"]
    missing: tuple[int, ...] = ()
    reason: str = ""


class Decision(msgspec.Struct, frozen=True):
    """``wait`` for the ``missing`` pods; ``conclude`` with an outcome of ``kind``; or obey the one that ``stands``."""

    action: Literal["wait", "conclude", "stands"]
    kind: OutcomeKind | None = None
    reason: str = ""
    missing: tuple[int, ...] = ()


def counts(start: AttemptStart, pod: int, vote: Vote) -> bool:
    """Whether a vote filed under ``pod`` belongs to this attempt: not stale, not misfiled."""
    return (
        vote.pod == pod
        and 0 <= pod < start.pods
        and vote.attempt == start.attempt
        and vote.incarnation == start.incarnation
    )


def _names(pods: list[int]) -> str:
    shown = ", ".join(map(str, pods[:8]))
    more = f" and {len(pods) - 8} more" if len(pods) > 8 else ""
    return f"pod{'s' if len(pods) > 1 else ''} {shown}{more}"


def tally(start: AttemptStart, votes: Mapping[int, Vote], lost: Set[int] = frozenset()) -> Tally:
    """Count the votes of one step. ``lost``: pods that are known to be gone, with all that they had captured."""
    counted = {pod: vote for pod, vote in votes.items() if counts(start, pod, vote)}
    for pod, vote in sorted(counted.items()):
        if not vote.ok:
            return Tally("no", reason=f"pod {pod}: {vote.reason or 'could not'}")
    if gone := sorted(pod for pod in lost if 0 <= pod < start.pods):
        return Tally("no", reason=f"{_names(gone)} lost")
    missing = tuple(pod for pod in range(start.pods) if pod not in counted)
    return Tally("open", missing=missing) if missing else Tally("yes")


def decide(
    start: AttemptStart,
    votes: Mapping[int, Vote],
    *,
    outcome: Outcome | None,
    past_deadline: bool,
    lost: Set[int],
) -> Decision:
    """What the coordinator does now about an attempt.

    ``votes``: by pod, of the step that the outcome hangs on (``captured`` for kind ``resume``, ``persisted`` for kind
    ``stop``). ``outcome``: the one that stands, if any. ``lost``: pods known to be gone.

    Invariants, each tested over all small cases:

    * Agreement: an outcome that stands is the decision, whatever the votes say now.
    * Validity: the attempt goes through only if every pod's own vote says yes and no pod is lost.
    * No abort without a cause: a no vote, a lost pod, or the deadline.
    * Stale votes (another attempt or incarnation, another pod's key, no such pod) change nothing.
    * Stability: more votes, more losses and more time never change a decision to abort for a no vote or a loss, and
      time alone never stops an attempt that all voted for.
    * Termination: after the deadline the decision is never to wait.
    """
    if outcome is not None:
        return Decision("stands", outcome.kind, outcome.reason)
    result = tally(start, votes, lost)
    if result.verdict == "yes":
        return Decision("conclude", start.kind)
    if result.verdict == "no":
        return Decision("conclude", "abort", result.reason)
    if past_deadline:
        late = f"no answer from {_names(list(result.missing))} within {start.deadline_seconds:g} s"
        return Decision("conclude", "abort", late, result.missing)
    return Decision("wait", missing=result.missing)
