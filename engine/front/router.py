"""Owns which replica gets a request: late binding, least expected wait.

Pure: loads in, a slot out. Knows no socket and no process. Called by the front actor with the replicas that may take
work; a replica that is dead, paused or full is not among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

SMOOTHING: Final = 0.3
PLACES_MAX: Final = 4096
UNKNOWN_STEPS_PER_S: Final = 1.0  # while no replica of the route has been measured: they are then equals


class ReplicaLoad(Struct, frozen=True, gc=False):
    """A replica that may take work. `outstanding` and `free_tokens` are estimated tokens."""

    slot: int
    num_seats: int
    num_free_seats: int
    outstanding: int
    free_tokens: int
    is_idle: bool = False


class RouterStatistics(Struct, frozen=True):
    steps_per_s: dict[int, float]


@dataclass(slots=True)
class _Speed:
    epoch: int
    busy_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0


def _smooth(known: float, measured: float) -> float:
    return known + SMOOTHING * (measured - known) if known else measured


class Router:
    """The replicas of one route and how fast each has proved to be.

    Speed is steps per busy second, and a full batch makes `num_seats` tokens a step. Tokens per second would not do: a
    replica with few sequences makes few tokens, would look slow, and would get fewer still.
    """

    __slots__ = ("_places", "_speeds")

    def __init__(self) -> None:
        self._speeds: dict[int, _Speed] = {}
        self._places: dict[str, int] = {}  # where each conversation was last, oldest first

    def choose(self, cost: int, loads: Sequence[ReplicaLoad], num_seats: int = 1, conversation: str = "") -> int | None:
        """The slot with the least expected wait, (outstanding + cost) / (seats * steps per second).

        The lowest slot among equals; None when nobody has `num_seats` free seats and room for `cost` tokens (an idle
        replica always has room, and says itself what is too much for it). A conversation goes where it was last, and
        where its prefix is cached, while that slot can take it at once. Changes nothing.
        """
        default = self._mean_steps_per_s()
        place = self._places.get(conversation) if conversation else None
        best: tuple[float, int] | None = None
        for load in loads:
            is_full = load.num_free_seats < num_seats or cost > load.free_tokens
            if load.num_free_seats <= 0 or (is_full and not load.is_idle):
                continue
            if load.slot == place:
                return place
            speed = self._speeds.get(load.slot)
            steps_per_s = speed.steps_per_s if speed is not None and speed.steps_per_s > 0 else default
            candidate = ((load.outstanding + cost) / (load.num_seats * steps_per_s), load.slot)
            if best is None or candidate < best:
                best = candidate
        return best[1] if best is not None else None

    def remember(self, conversation: str, slot: int) -> None:
        """It was sent there. The longest unused of PLACES_MAX is forgotten."""
        self._places.pop(conversation, None)
        self._places[conversation] = slot
        if len(self._places) > PLACES_MAX:
            del self._places[next(iter(self._places))]

    def _mean_steps_per_s(self) -> float:
        known = [speed.steps_per_s for speed in self._speeds.values() if speed.steps_per_s > 0]
        return sum(known) / len(known) if known else UNKNOWN_STEPS_PER_S

    def observe(self, slot: int, epoch: int, busy_s: float, num_steps: int, num_tokens: int) -> None:
        """A worker's counters since its start. Changes the slot's speed; a new epoch's counters begin at zero."""
        speed = self._speeds.get(slot)
        if speed is None:
            speed = self._speeds[slot] = _Speed(epoch)
        elif speed.epoch != epoch:
            speed.epoch, speed.busy_s, speed.num_steps, speed.num_tokens = epoch, 0.0, 0, 0
        spent_s, steps, tokens = busy_s - speed.busy_s, num_steps - speed.num_steps, num_tokens - speed.num_tokens
        if spent_s <= 0 or steps <= 0 or tokens < 0:
            return
        speed.busy_s, speed.num_steps, speed.num_tokens = busy_s, num_steps, num_tokens
        speed.steps_per_s = _smooth(speed.steps_per_s, steps / spent_s)
        speed.tokens_per_s = _smooth(speed.tokens_per_s, tokens / spent_s)

    def forget(self, slot: int) -> None:
        """This slot is gone for good."""
        self._speeds.pop(slot, None)

    def tokens_per_s(self, slot: int) -> float:
        """Tokens per busy second lately: for people, not for routing."""
        speed = self._speeds.get(slot)
        return speed.tokens_per_s if speed is not None else 0.0

    def statistics(self) -> RouterStatistics:
        return RouterStatistics({slot: speed.steps_per_s for slot, speed in sorted(self._speeds.items())})
