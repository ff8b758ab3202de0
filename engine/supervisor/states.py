"""Owns the states of a replica and its legal moves. Knows nothing else. `engine states` prints the table."""

from enum import Enum
from typing import Final


class ReplicaState(Enum):
    STOPPED = "stopped"  # no process, none wanted
    STARTING = "starting"  # spawned; importing, loading, warming up
    READY = "ready"  # warm, and given work
    SUSPECT = "suspect"  # a deadline passed: no new work, stacks dumped, about to be killed
    DRAINING = "draining"  # no new work, finishing what it has
    STOPPING = "stopping"  # told to end
    BACKOFF = "backoff"  # died; will be started again after a wait
    QUARANTINED = "quarantined"  # killed and not gone: its device gets no second owner
    FAILED = "failed"  # died too often, or cannot start: somebody has to look


_R = ReplicaState

TRANSITIONS: Final[dict[ReplicaState, frozenset[ReplicaState]]] = {
    _R.STOPPED: frozenset({_R.STARTING}),
    _R.STARTING: frozenset({_R.READY, _R.SUSPECT, _R.STOPPING, _R.BACKOFF, _R.FAILED, _R.STOPPED}),
    _R.READY: frozenset({_R.SUSPECT, _R.DRAINING, _R.BACKOFF, _R.FAILED, _R.STOPPED}),
    _R.SUSPECT: frozenset({_R.QUARANTINED, _R.BACKOFF, _R.FAILED, _R.STOPPED}),
    _R.DRAINING: frozenset({_R.STOPPING, _R.SUSPECT, _R.STOPPED, _R.BACKOFF, _R.FAILED}),
    _R.STOPPING: frozenset({_R.STOPPED, _R.QUARANTINED}),
    _R.BACKOFF: frozenset({_R.STARTING, _R.STOPPED}),
    _R.QUARANTINED: frozenset({_R.STOPPED, _R.BACKOFF, _R.FAILED}),
    _R.FAILED: frozenset({_R.STARTING, _R.STOPPED}),
}


def advance(state: ReplicaState, to: ReplicaState) -> ReplicaState:
    """The next state. Raises ValueError when the table has no such move."""
    if to not in TRANSITIONS[state]:
        raise ValueError(f"a replica cannot go from {state.value} to {to.value}")
    return to
