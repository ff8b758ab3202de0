"""Owns what happens next to one replica: one small move per look, from what is seen and the time.

Pure: no process, no clock, no socket. The supervisor actor looks, calls `decide`, does what the move says, and calls
`apply`. Restarts follow OTP's intensity and period: a replica that dies more often than that is FAILED, and a short
success in between forgives nothing.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from msgspec import Struct

from engine.supervisor.states import ReplicaState, advance
from ipc.health import Page, Phase

EXIT_CONFIG: Final = 78
BOOT_TRIES: Final = 3
DUMP_S: Final = 0.3  # for the stacks of a suspect to reach the log
REAP_S: Final = 10.0  # a killed process that is not gone by then is stuck in the kernel
JITTER: Final = 0.25


class Target(Enum):
    RUN = "run"
    STOP = "stop"


class Action(Enum):
    """What the shell has to do for a move."""

    NONE = "none"
    SPAWN = "spawn"
    ADMIT = "admit"  # tell the front that it may have work
    PAUSE = "pause"  # tell the front to give it nothing more
    DUMP = "dump"  # pause, and SIGUSR1: the stacks go to the log
    TERMINATE = "terminate"  # SIGTERM
    KILL = "kill"  # SIGKILL
    REAP = "reap"  # it has ended: tell the front, give its descriptors back


class RestartPolicy(Struct, frozen=True):
    """`intensity` deaths within `period_s` are survived; the wait doubles with each, up to `backoff_max_s`."""

    intensity: int = 5
    period_s: float = 60.0
    backoff_s: float = 0.2
    backoff_max_s: float = 10.0
    boot_s: float = 120.0
    stop_grace_s: float = 5.0
    drain_s: float = 30.0

    def delay_s(self, num_deaths: int, random: Callable[[], float]) -> float:
        """Wait before the restart after the `num_deaths`-th death of the window (1 is the first)."""
        base = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(num_deaths - 1, 60))
        return base * (1 + JITTER * random())


class Seen(Struct, frozen=True):
    """One look at a replica. `exit_status` is None while its process runs; `lateness_s` is how late the look itself is,
    which the worker must not pay for."""

    has_process: bool = False
    exit_status: int | None = None
    page: Page | None = None
    said_ready: bool = False
    is_empty: bool = False
    lateness_s: float = 0.0


class Move(Struct, frozen=True):
    """Go to `to` (or stay) and do `action`. `until` is the end of a back-off."""

    to: ReplicaState
    action: Action = Action.NONE
    reason: str = ""
    until: float = 0.0


@dataclass(slots=True, eq=False)
class Replica:
    """The record of one running copy; it survives its processes. Instants are monotonic seconds."""

    slot: int
    route: str
    index: int  # within its deployment
    devices: list[str] = field(default_factory=lambda: ["cpu"])
    state: ReplicaState = ReplicaState.STOPPED
    target: Target = Target.RUN
    epoch: int = 0
    state_at: float = 0.0
    spawned_at: float = 0.0
    ready_after_s: float = 0.0
    was_ready: bool = False
    killed_at: float = inf
    backoff_until: float = 0.0
    deaths: list[float] = field(default_factory=list)  # of the window
    num_deaths: int = 0
    num_boot_failures: int = 0
    reason: str = ""


def decide(replica: Replica, seen: Seen, policy: RestartPolicy, now: float, random: Callable[[], float]) -> Move | None:
    """The next move, or None when there is nothing to do. Changes nothing."""
    if seen.has_process and seen.exit_status is not None:
        return _after_end(replica, seen, policy, now, random)
    state = replica.state
    wants_stop = replica.target is Target.STOP
    if state in _WITHOUT_PROCESS:
        return _without_process(replica, wants_stop, now)
    if state in {ReplicaState.SUSPECT, ReplicaState.STOPPING}:
        return _ending(replica, policy, now)
    if state is ReplicaState.QUARANTINED:
        return None
    if hung := _hang(replica, seen, policy, now):
        return Move(ReplicaState.SUSPECT, Action.DUMP, hung)
    if state is ReplicaState.STARTING:
        return _starting(seen, wants_stop)
    if state is ReplicaState.READY:
        return Move(ReplicaState.DRAINING, Action.PAUSE) if wants_stop else None
    if seen.is_empty or now - replica.state_at > policy.drain_s:  # DRAINING
        return Move(ReplicaState.STOPPING, Action.TERMINATE)
    return None


_WITHOUT_PROCESS: Final = frozenset({ReplicaState.STOPPED, ReplicaState.BACKOFF, ReplicaState.FAILED})


def _without_process(replica: Replica, wants_stop: bool, now: float) -> Move | None:
    if replica.state is ReplicaState.STOPPED:
        return None if wants_stop else Move(ReplicaState.STARTING, Action.SPAWN)
    if wants_stop:
        return Move(ReplicaState.STOPPED)
    if replica.state is ReplicaState.BACKOFF and now >= replica.backoff_until:
        return Move(ReplicaState.STARTING, Action.SPAWN)
    return None


def _starting(seen: Seen, wants_stop: bool) -> Move | None:
    if wants_stop:
        return Move(ReplicaState.STOPPING, Action.TERMINATE)
    warm = seen.page is not None and seen.page.phase in {Phase.IDLE, Phase.STEPPING}
    return Move(ReplicaState.READY, Action.ADMIT) if seen.said_ready and warm else None


def _ending(replica: Replica, policy: RestartPolicy, now: float) -> Move | None:
    """SUSPECT or STOPPING: kill after the grace, quarantine what survives that."""
    if replica.killed_at == inf:
        grace_s = DUMP_S if replica.state is ReplicaState.SUSPECT else policy.stop_grace_s
        return Move(replica.state, Action.KILL) if now - replica.state_at >= grace_s else None
    if now - replica.killed_at > REAP_S:
        return Move(ReplicaState.QUARANTINED, reason=f"killed {REAP_S:g} s ago and not gone: stuck in the kernel")
    return None


def _hang(replica: Replica, seen: Seen, policy: RestartPolicy, now: float) -> str:
    """Why the worker counts as hung, or "". A deadline it wrote itself has passed, or it takes too long to start."""
    if replica.state is ReplicaState.STARTING and now - replica.spawned_at - seen.lateness_s > policy.boot_s:
        return f"not ready after {policy.boot_s:g} s"
    page = seen.page
    if page is None or page.epoch != replica.epoch:
        return ""
    if page.is_corrupt:
        return "its health page is corrupt"
    late_s = now - page.deadline_at - seen.lateness_s
    return f"hung in {page.phase.name.lower()}: {late_s:.1f} s over its deadline" if late_s > 0 else ""


def _after_end(replica: Replica, seen: Seen, policy: RestartPolicy, now: float, random: Callable[[], float]) -> Move:
    """The process is gone: stopped as wanted, or a death that may be answered by a restart."""
    status = seen.exit_status if seen.exit_status is not None else 0
    reason = _why(replica, status, seen.page)
    if replica.state is ReplicaState.STOPPING:
        return Move(ReplicaState.STOPPED, Action.REAP)  # as it was told, whatever is wanted now
    if replica.target is Target.STOP:
        return Move(ReplicaState.STOPPED, Action.REAP, reason)
    if status == EXIT_CONFIG:
        return Move(ReplicaState.FAILED, Action.REAP, f"{reason}: its configuration or weights are wrong")
    if not replica.was_ready and replica.num_boot_failures + 1 >= BOOT_TRIES:
        return Move(ReplicaState.FAILED, Action.REAP, f"{reason}; {BOOT_TRIES} starts failed")
    num_deaths = 1 + sum(now - at < policy.period_s for at in replica.deaths)
    if num_deaths > policy.intensity:
        return Move(ReplicaState.FAILED, Action.REAP, f"{reason}; {num_deaths} deaths in {policy.period_s:g} s")
    return Move(ReplicaState.BACKOFF, Action.REAP, reason, now + policy.delay_s(num_deaths, random))


def _why(replica: Replica, status: int, page: Page | None) -> str:
    """The end of a process in words."""
    if status < 0:
        try:
            ended = f"killed by {signal.Signals(-status).name}"
        except ValueError:
            ended = f"killed by signal {-status}"
    else:
        ended = f"exit code {status}"
    parts = [ended]
    if replica.state in {ReplicaState.SUSPECT, ReplicaState.QUARANTINED} and replica.reason:
        parts.append(replica.reason)
    if page is not None and page.reason:
        parts.append(page.reason)
    return ", ".join(parts)


def apply(replica: Replica, move: Move, policy: RestartPolicy, now: float) -> None:
    """Write a move into the record. Changes the replica. Raises ValueError for an illegal move."""
    if move.action is Action.KILL:
        replica.killed_at = now
    if move.action is Action.SPAWN:
        replica.epoch += 1  # before the spawn: whatever an older process still says is stale
        replica.spawned_at, replica.killed_at, replica.was_ready = now, inf, False
    if move.action is Action.REAP and move.to is not ReplicaState.STOPPED:
        replica.deaths = [at for at in replica.deaths if now - at < policy.period_s] + [now]
        replica.num_deaths += 1
        replica.num_boot_failures = 0 if replica.was_ready else replica.num_boot_failures + 1
    if move.to is replica.state:
        return
    replica.state = advance(replica.state, move.to)
    replica.state_at = now
    replica.backoff_until = move.until
    if move.reason or move.to is ReplicaState.STOPPED:
        replica.reason = move.reason
    if move.to is ReplicaState.READY:
        replica.was_ready, replica.num_boot_failures = True, 0
        replica.ready_after_s = now - replica.spawned_at
