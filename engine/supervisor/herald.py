"""Owns what a service manager is told of the engine, and when: lines of systemd's notification protocol.

Pure: what is seen and the time in, lines out. Called by the supervisor actor at each look. That somebody looks proves
that the supervisor runs; that the front runs is proved by its answer to a question, put through its mailbox and given
from its timer. Without both, no sign of life: a manager that watches then starts the engine again. Workers do not
matter to it, they are the supervisor's own business.
"""

from math import inf
from typing import Final

from ipc.control import Placed

EXTEND_EVERY_S: Final = 1.0
EXTEND_S: Final = 15.0  # a start or a drain may take this much longer than the last line said

Lines = list[str]


class Herald:
    """One engine's. All lines but those of `pulse` are to arrive, in order; each call's belong into one datagram."""

    def __init__(self, watchdog_s: float, now: float) -> None:
        """`watchdog_s`: the manager kills after so long a silence; 0: it does not watch."""
        self._ping_s = watchdog_s / 2
        self._ping_at = now if watchdog_s else inf
        self._extend_at = now
        self._question = 0
        self._answer = 0
        self._is_proven = False
        self._is_ready = False
        self._is_stopping = False
        self._is_hopeful = True
        self._seen = ""
        self._note = ""

    def observe(self, placed: Placed) -> Lines:
        """What has changed: ready once, when a first route serves; stopping once, when a drain begins."""
        lines = []
        if placed.state == "draining":
            lines = self.stopping()
        elif not self._is_ready and any(route.is_ready for route in placed.routes):
            self._is_ready = True
            lines = ["READY=1"]
        self._is_hopeful = any(route.state == "starting" for route in placed.routes)
        seen = describe(placed)
        if seen != self._seen:
            self._seen = seen
            lines.append(self._status())
        return lines

    def stopping(self) -> Lines:
        """The end has begun; nothing when that was said."""
        lines = [] if self._is_stopping else ["STOPPING=1"]
        self._is_stopping = True
        return lines

    def reloading(self, now: float) -> Lines:
        """A reload begins. Nothing before the engine was ready: what follows a reload would say that it is."""
        if not self._is_ready or self._is_stopping:
            return []
        return ["RELOADING=1", f"MONOTONIC_USEC={int(now * 1e6)}"]

    def reloaded(self, is_applied: bool) -> Lines:
        """A reload has ended. That it was refused can be told in words only, and is until one is applied."""
        self._note = "" if is_applied else "; the last reload was refused"
        if not self._is_ready or self._is_stopping:
            return []
        return ["READY=1", self._status()]

    def question(self, now: float) -> int:
        """The number of what the front is to be asked now; 0 for nothing. One question is open at a time."""
        is_due = now >= self._ping_at or (self._may_extend and now >= self._extend_at)
        if not is_due or self._question != self._answer or self._is_proven:
            return 0
        self._question += 1
        return self._question

    def answered(self, number: int) -> None:
        """The front has had a turn since it was asked."""
        self._answer = number
        self._is_proven = number == self._question

    def pulse(self, now: float) -> Lines:
        """The signs of life that are due, once the front has answered the question about them."""
        if not self._is_proven:
            return []
        self._is_proven = False
        lines = []
        if now >= self._ping_at:
            lines.append("WATCHDOG=1")
            self._ping_at = _after(self._ping_at, self._ping_s, now)
        if self._may_extend and now >= self._extend_at:
            lines.append(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
            self._extend_at = _after(self._extend_at, EXTEND_EVERY_S, now)
        return lines

    @property
    def _may_extend(self) -> bool:
        """While a first route may still come, and while a drain lasts: the supervisor bounds both."""
        return self._is_stopping or (self._is_hopeful and not self._is_ready)

    def _status(self) -> str:
        return f"STATUS={self._seen}{self._note}"


def describe(placed: Placed) -> str:
    """One short line for people."""
    num_ready = sum(replica.state == "ready" for replica in placed.replicas)
    word = "loading" if placed.state == "starting" else placed.state
    return f"{word}: {num_ready} of {len(placed.replicas)} replicas ready"


def _after(at: float, period_s: float, now: float) -> float:
    """The next of a series of instants, or a whole period from now when that one has passed as well."""
    return at + period_s if at + period_s > now else now + period_s
