"""Owns the error codes, the two exception types and the one table from code to HTTP status.

Knows no socket and no message. Called by everything that refuses something.
"""

from enum import StrEnum
from typing import Final


class Code(StrEnum):
    """Why a request or a message was refused. The value is what travels."""

    INVALID = "invalid"  # a field is wrong; `field` names it
    NOT_FOUND = "not_found"  # no such route or request
    DUPLICATE = "duplicate"  # the id is already open in this session
    TOO_LARGE = "too_large"  # over a limit of bytes, tokens or blocks
    UNSUPPORTED = "unsupported"  # unknown kind, version or field whose meaning is not built
    OVERLOADED = "overloaded"  # a queue is full; come back after retry_after_s
    UNAVAILABLE = "unavailable"  # nobody can serve it now; retry
    WORKER_LOST = "worker_lost"  # the worker died while it ran; retry
    EXPIRED = "expired"  # its deadline passed
    CANCELLED = "cancelled"  # its client asked, or went away
    SLOW_READER = "slow_reader"  # its client did not read
    NO_SESSION = "no_session"  # HELLO first (the front restarted, or the session was ended)
    PROTOCOL = "protocol"  # frames that break the wire specification
    DENIED = "denied"  # not allowed for this peer
    INTERNAL = "internal"  # our fault


HTTP_STATUS: Final[dict[Code, int]] = {
    Code.INVALID: 400,
    Code.NOT_FOUND: 404,
    Code.DUPLICATE: 400,
    Code.TOO_LARGE: 413,
    Code.UNSUPPORTED: 400,
    Code.OVERLOADED: 503,
    Code.UNAVAILABLE: 503,
    Code.WORKER_LOST: 503,
    Code.EXPIRED: 504,
    Code.CANCELLED: 499,
    Code.SLOW_READER: 499,
    Code.NO_SESSION: 503,
    Code.PROTOCOL: 400,
    Code.DENIED: 403,
    Code.INTERNAL: 500,
}

RETRYABLE: Final[frozenset[Code]] = frozenset({Code.OVERLOADED, Code.UNAVAILABLE, Code.WORKER_LOST, Code.NO_SESSION})


class EngineError(Exception):
    """The caller's fault, or a refusal: travels to the client as `Failed`.

    `field` names the offending field ("" when none does); `retry_after_s` is set by refusals that pass by themselves.
    """

    def __init__(self, code: Code, message: str, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        where = f" (field {self.field})" if self.field else ""
        return f"{self.code.value}: {self.message}{where}"

    @property
    def is_retryable(self) -> bool:
        return self.code in RETRYABLE


class ProtocolError(Exception):
    """A peer broke the wire specification. Its session ends; nobody else notices."""

    def __init__(self, message: str, code: Code = Code.PROTOCOL, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field
