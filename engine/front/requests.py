"""Owns the request table: every open request, the legal moves of its state, and the fence that keeps stale work out.

Knows no socket and no payload. Called by the front actor. An emission counts only if the replica, the attempt and the
index are the ones the table expects; whatever else arrives is late, doubled or out of order, and is told so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import Final

from msgspec import Struct

from ipc.errors import Code, EngineError
from ipc.messages import Emissions


class RequestState(Enum):
    QUEUED = "queued"
    DISPATCHED = "dispatched"  # a worker has it, nothing has come back
    STREAMING = "streaming"  # ids have come back
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_S = RequestState
_ENDS: Final = frozenset({_S.FINISHED, _S.FAILED, _S.CANCELLED, _S.EXPIRED})

TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    _S.QUEUED: frozenset({_S.DISPATCHED, _S.FAILED, _S.CANCELLED, _S.EXPIRED}),
    _S.DISPATCHED: frozenset({_S.STREAMING, _S.QUEUED}) | _ENDS,
    _S.STREAMING: frozenset({_S.QUEUED}) | _ENDS,
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.EXPIRED: frozenset(),
}


def advance(state: RequestState, to: RequestState) -> RequestState:
    """The next state. Raises ValueError when the table has no such move."""
    if to not in TRANSITIONS[state]:
        raise ValueError(f"a request cannot go from {state.value} to {to.value}")
    return to


class PriorityClass(IntEnum):
    """Classes, most urgent first."""

    REALTIME = 0
    INTERACTIVE = 1
    BATCH = 2


CLASSES: Final[dict[str, PriorityClass]] = {each.name.lower(): each for each in PriorityClass}


def priority_class(name: str, field_name: str = "priority") -> PriorityClass:
    """The class of this name. Raises EngineError `invalid`."""
    try:
        return CLASSES[name]
    except KeyError:
        message = f"no class {name!r}; there are {', '.join(CLASSES)}"
        raise EngineError(Code.INVALID, message, field_name) from None


@dataclass(slots=True, eq=False)
class Request:
    """One request from acceptance to its final message. Instants are monotonic seconds; `cost` is in tokens."""

    number: int
    session: int
    name: str  # the client's own id: echoed, never a key outside its session
    route: str
    priority: PriorityClass
    tenant: str
    cost: int
    arrived_at: float
    deadline_at: float = inf
    dispatched_at: float = 0.0
    started_at: float = 0.0
    conversation: str = ""  # with its tenant
    is_detached: bool = False  # runs on without its session
    seed: int = 0
    body: bytes = b""
    traceparent: str = ""
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    slot: int = -1
    num_choices: int = 1
    ids: list[int] = field(default_factory=list)  # of choice 0, forwarded so far; its length is the next index
    other_ids: list[list[int]] = field(default_factory=list)  # of choices 1, 2, ...

    def __post_init__(self) -> None:
        self.other_ids = [[] for _ in range(self.num_choices - 1)]

    @property
    def num_ids(self) -> int:
        """Tokens forwarded so far, of all choices."""
        return len(self.ids) + sum(map(len, self.other_ids))


class RequestStatistics(Struct, frozen=True):
    num_open: int
    num_queued: int
    num_accepted: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_expired: int
    num_tokens: int
    num_stale: int


class RequestTable:
    """Open requests by number. Numbers are never reused."""

    __slots__ = (
        "_by_number",
        "_ended",
        "_next_number",
        "_requests_max",
        "num_queued",
        "num_stale",
        "num_tokens",
        "started",
    )

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._by_number: dict[int, Request] = {}
        self._next_number = 1
        self._ended = dict.fromkeys(_ENDS, 0)
        self.num_queued = 0
        self.num_stale = 0
        self.num_tokens = 0
        self.started: list[Request] = []  # those whose first ids came since somebody last took this list

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Request | None:
        return self._by_number.get(number)

    def next_number(self) -> int:
        """A number no request has had. Changes the table."""
        number = self._next_number
        self._next_number += 1
        return number

    def add(self, request: Request) -> None:
        """A queued request. Raises EngineError `overloaded` when too many are open."""
        if len(self._by_number) >= self._requests_max:
            message = f"{self._requests_max} requests are open in this engine"
            raise EngineError(Code.OVERLOADED, message, retry_after_s=1.0)
        self._by_number[request.number] = request
        self.num_queued += 1

    def dispatch(self, request: Request, slot: int) -> None:
        """QUEUED -> DISPATCHED: this slot has it, under a new attempt."""
        request.state = advance(request.state, RequestState.DISPATCHED)
        request.slot = slot
        request.attempt += 1
        self.num_queued -= 1

    def requeue(self, request: Request) -> None:
        """DISPATCHED or STREAMING -> QUEUED: its worker gave it back; late emissions of that attempt are stale."""
        request.state = advance(request.state, RequestState.QUEUED)
        request.slot = -1
        request.attempt += 1
        self.num_queued += 1

    def end(self, request: Request, to: RequestState) -> None:
        """Move to a final state and forget. Raises ValueError when it has ended before."""
        was_queued = request.state is RequestState.QUEUED
        request.state = advance(request.state, to)
        self.num_queued -= was_queued
        self._ended[to] += 1
        del self._by_number[request.number]

    def accept(self, slot: int, told: Emissions) -> list[int]:
        """Take one emission per column position; returns the positions that are stale or out of order.

        `ids` holds counts[0] ids of the first, then counts[1] of the second, and so on. The hot path of the front: once
        per step and client connection, one turn of the loop per token.
        """
        numbers, attempts, indexes, counts = told.numbers, told.attempts, told.indexes, told.counts
        ids, choices = told.ids, told.choices
        rejected: list[int] = []
        requests = self._by_number
        streaming = RequestState.STREAMING
        num_tokens = end = 0
        for position, number in enumerate(numbers):
            count = counts[position]
            start, end = end, end + count
            request = requests.get(number)
            if request is None or request.slot != slot or request.attempt != attempts[position]:
                rejected.append(position)
                continue
            known = request.ids
            if choices and (choice := choices[position]):
                if choice >= request.num_choices:
                    rejected.append(position)
                    continue
                known = request.other_ids[choice - 1]
            if indexes[position] != len(known):
                rejected.append(position)
                continue
            if count == 1:
                known.append(ids[start])
            else:
                known += ids[start:end]
            num_tokens += count
            if request.state is not streaming and count:
                request.state = advance(request.state, streaming)
                self.started.append(request)
        self.num_tokens += num_tokens
        self.num_stale += len(rejected)
        return rejected

    def statistics(self) -> RequestStatistics:
        ended = self._ended
        return RequestStatistics(
            len(self._by_number),
            self.num_queued,
            self._next_number - 1,
            ended[_S.FINISHED],
            ended[_S.FAILED],
            ended[_S.CANCELLED],
            ended[_S.EXPIRED],
            self.num_tokens,
            self.num_stale,
        )
