"""Owns what the Front actor and the Supervisor actor say to each other, and nothing else.

The two share a process today; these messages are all they share, so that either could move. Slots and epochs mean what
they mean everywhere: an epoch is raised before each spawn, and what an older epoch says is ignored.
"""

from msgspec import Struct

from ipc.messages import ReplicaReport, RouteReport, StatusReport, WorkerReady

# Supervisor -> Front.


class Expect(Struct, frozen=True):
    """A worker was spawned for `slot`; it may introduce itself once with `token`."""

    slot: int
    epoch: int
    route: str
    token: str


class Admit(Struct, frozen=True):
    """The replica is READY: it may be given work."""

    slot: int
    epoch: int


class Pause(Struct, frozen=True):
    """No new work for this replica: it is suspect, or draining. Answer `Emptied` when nothing of it is in flight."""

    slot: int
    epoch: int


class Lost(Struct, frozen=True):
    """The worker is dead; what it ran ends with one retryable error."""

    slot: int
    epoch: int
    reason: str


class Close(Struct, frozen=True):
    """Accept no new request; answer `Drained` when none is open."""


class Placed(Struct, frozen=True):
    """The supervisor's account, sent at every change: what `status` and `models` repeat."""

    state: str
    config_hash: str
    routes: list[RouteReport]
    replicas: list[ReplicaReport]


class AskStatus(Struct, frozen=True):
    """Answer with `StatusTold` carrying the same `question`."""

    question: int


class Turn(Struct, frozen=True):
    """Answer `Turned` with the same number from a timer, not from here: that proves the mailbox and the timers."""

    number: int


# Front -> Supervisor.


class Arrived(Struct, frozen=True):
    """The worker of this slot and epoch introduced itself."""

    slot: int
    epoch: int


class SaidReady(Struct, frozen=True):
    """The worker says that its warm-up is done."""

    slot: int
    epoch: int
    ready: WorkerReady


class Emptied(Struct, frozen=True):
    """A paused replica has nothing in flight."""

    slot: int
    epoch: int


class Drained(Struct, frozen=True):
    """No request is open, and none is accepted any more."""


class StatusTold(Struct, frozen=True):
    question: int
    report: StatusReport


class Turned(Struct, frozen=True):
    """The front has had the turn that it was asked for."""

    number: int
