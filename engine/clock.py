"""Owns the notion of time that deciders and shells share: monotonic seconds. Knows nothing else.

Deciders take `now` as a float; shells hold a `Clock` so that tests can hold a fake one.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds; `tests/fakes.py` has one that is moved by hand."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC: the same for every process of one boot, so instants may cross processes."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()


def stamp() -> int:
    """Seconds since 1970, for people. Never for waiting: anybody may set that clock."""
    return int(time.time())
