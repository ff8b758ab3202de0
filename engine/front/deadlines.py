"""Owns which open request expires next. Pure: numbers and instants in, numbers out. Called by the front actor.

Entries of requests that have ended stay until they are met or swept: a deadline of days must not keep memory for days.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

GARBAGE_MIN: Final = 64


class Deadlines:
    """Deadlines of open requests, earliest first. `is_open(number)` says whether one still matters."""

    __slots__ = ("_heap", "_is_open")

    def __init__(self, is_open: Callable[[int], bool]) -> None:
        self._heap: list[tuple[float, int]] = []
        self._is_open = is_open

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_at: float, number: int, num_open: int) -> None:
        """A request expires at `deadline_at`; infinity is never. Sweeps when most entries are of ended requests."""
        if deadline_at == inf:
            return
        if len(self._heap) > GARBAGE_MIN + 2 * num_open:
            self._heap = [each for each in self._heap if self._is_open(each[1])]
            heapify(self._heap)
        heappush(self._heap, (deadline_at, number))

    def due(self, now: float) -> list[int]:
        """Open requests whose deadline has passed, earliest first. Changes the queue: each is told once."""
        numbers = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heappop(self._heap)
            if self._is_open(number):
                numbers.append(number)
        return numbers

    def next_at(self) -> float:
        """When to look again; infinity when nothing expires. Changes nothing."""
        return self._heap[0][0] if self._heap else inf
