"""Owns whether a request is accepted: static limits, cheapest first, and when a refused one should come back.

Pure: numbers and `now` in, an EngineError or nothing out. Knows no socket. Called by the front actor. A refusal costs
microseconds and says what would help.
"""

from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from ipc.errors import Code, EngineError

RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 60.0
BYTES_PER_TOKEN: Final = 4.0  # until a route has been measured
SMOOTHING: Final = 0.1
RATE_WINDOW_S: Final = 1.0


class Limits(Struct, frozen=True):
    """Bounds of one front: bytes of a body, open requests of one session and of all."""

    body_bytes_max: int
    session_requests_max: int
    requests_max: int


class AdmissionStatistics(Struct, frozen=True):
    bytes_per_token: float
    ends_per_s: float


@dataclass(slots=True)
class _Measured:
    """What a route has shown: bytes per prompt token, and how fast its requests end."""

    bytes_per_token: float = BYTES_PER_TOKEN
    ends_per_s: float = 0.0
    num_ends: int = 0
    since: float = -1.0


class Admission:
    """The gates that need no prediction, and the measurements they use."""

    __slots__ = ("_routes", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._routes: dict[str, _Measured] = {}

    def _route(self, route: str) -> _Measured:
        measured = self._routes.get(route)
        if measured is None:
            measured = self._routes[route] = _Measured()
        return measured

    def check(self, num_bytes: int, num_session: int, num_all: int) -> None:
        """Raises EngineError: `too_large` for the body, `overloaded` for too many open requests. Changes nothing."""
        limits = self.limits
        if num_bytes > limits.body_bytes_max:
            message = f"the body has {num_bytes} bytes, {limits.body_bytes_max} are allowed"
            raise EngineError(Code.TOO_LARGE, message, "body")
        if num_session >= limits.session_requests_max:
            message = f"this session has {num_session} open requests, which is its limit"
            raise EngineError(Code.OVERLOADED, message, retry_after_s=1.0)
        if num_all >= limits.requests_max:
            message = f"the engine has {num_all} open requests, which is its limit"
            raise EngineError(Code.OVERLOADED, message, retry_after_s=1.0)

    def check_queue(self, route: str, num_queued: int, queued_max: int) -> None:
        """Raises EngineError `overloaded` with the time the queue needs to have room again. Changes nothing."""
        if num_queued >= queued_max:
            message = f"{num_queued} requests wait for route {route}, which is its limit"
            raise EngineError(Code.OVERLOADED, message, retry_after_s=self.retry_after_s(route, num_queued))

    def retry_after_s(self, route: str, num_queued: int) -> float:
        """Half the queue at the rate at which requests of this route end, within bounds. Changes nothing."""
        rate = self._route(route).ends_per_s
        wait_s = num_queued / 2 / rate if rate > 0 else 1.0
        return round(min(RETRY_MAX_S, max(RETRY_MIN_S, wait_s)), 3)

    def cost(self, route: str, num_bytes: int, max_tokens: int) -> int:
        """Estimated tokens of a request: its prompt by bytes, and all it may generate. Changes nothing."""
        return int(num_bytes / self._route(route).bytes_per_token) + max_tokens + 1

    def observe_prompt(self, route: str, num_bytes: int, num_tokens: int) -> None:
        """A worker said how long a prompt really was. Changes the route's ratio."""
        if num_tokens > 0:
            measured = self._route(route)
            measured.bytes_per_token += SMOOTHING * (num_bytes / num_tokens - measured.bytes_per_token)

    def observe_end(self, route: str, now: float) -> None:
        """A request of this route ended at `now`. Changes the route's rate once per window."""
        measured = self._route(route)
        if measured.since < 0:
            measured.since = now
            return
        measured.num_ends += 1
        elapsed_s = now - measured.since
        if elapsed_s >= RATE_WINDOW_S:
            rate = measured.num_ends / elapsed_s
            measured.ends_per_s = rate if not measured.ends_per_s else (measured.ends_per_s + rate) / 2
            measured.num_ends, measured.since = 0, now

    def statistics(self, route: str) -> AdmissionStatistics:
        measured = self._route(route)
        return AdmissionStatistics(round(measured.bytes_per_token, 3), round(measured.ends_per_s, 3))
