"""Owns the sessions: who has said HELLO, when each was last heard, and what could not be sent to it yet.

Knows no request beyond its number and no socket. Called by the front actor alone. A peer without a session has no
state here, however much it sends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from engine.front.outbox import Outbox
from engine.keys import Key


@dataclass(slots=True, eq=False)
class Session:
    """One client connection. `identity` is the routing id libzmq gave it; `number` is what workers know it by."""

    number: int
    identity: bytes
    outbox: Outbox
    heard_at: float
    name: str = ""
    door: int = 0  # which of the sockets it came by
    key: Key | None = None  # of a peer that had to show one
    requests: dict[str, int] = field(default_factory=dict)  # the client's id -> number, open ones only


class SessionStatistics(Struct, frozen=True):
    num_sessions: int
    num_clogged: int
    outbox_bytes: int


class SessionTable:
    """All sessions, by routing id and by number. Numbers are never reused."""

    __slots__ = ("_by_identity", "_by_number", "_next_number", "clogged")

    def __init__(self) -> None:
        self._by_identity: dict[tuple[int, bytes], Session] = {}
        self._by_number: dict[int, Session] = {}
        self._next_number = 1
        self.clogged: set[Session] = set()  # sessions whose outbox holds something

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_identity.values()))

    def open(
        self, identity: bytes, name: str, outbox: Outbox, now: float, door: int = 0, key: Key | None = None
    ) -> Session:
        """A new session for this peer. Changes the table."""
        session = Session(self._next_number, identity, outbox, now, name, door, key)
        self._next_number += 1
        self._by_identity[door, identity] = session
        self._by_number[session.number] = session
        return session

    def of_identity(self, identity: bytes, door: int = 0) -> Session | None:
        """Two sockets may give the same id to two peers."""
        return self._by_identity.get((door, identity))

    def of_number(self, number: int) -> Session | None:
        return self._by_number.get(number)

    def close(self, session: Session) -> None:
        """Forget it: its frames are from now on those of a stranger. Changes the table."""
        self._by_identity.pop((session.door, session.identity), None)
        self._by_number.pop(session.number, None)
        self.clogged.discard(session)

    def silent(self, now: float, silence_s: float) -> list[Session]:
        """Sessions not heard for longer than `silence_s`. Changes nothing."""
        heard_after = now - silence_s
        return [session for session in self._by_identity.values() if session.heard_at < heard_after]

    def statistics(self) -> SessionStatistics:
        total = sum(session.outbox.num_bytes for session in self.clogged)
        return SessionStatistics(len(self._by_identity), len(self.clogged), total)
