"""Owns the front's view of each replica: who may speak for a slot, what it has in flight, what it last reported.

Knows no process and no socket. Called by the front actor. An older epoch, a wrong token or a second introduction is
refused here.
"""

from dataclasses import dataclass, field

from engine.front.router import ReplicaLoad
from ipc.control import Expect
from ipc.errors import Code, ProtocolError
from ipc.messages import Report, WorkerHello, WorkerReady

IDENTITY_SEPARATOR = b"|"


@dataclass(slots=True, eq=False)
class ReplicaView:
    """One slot in its current epoch. `in_flight` maps request number to its estimated tokens and its seats, ended ones
    included until the worker has confirmed that the seats are free; `num_taken` are those seats."""

    slot: int
    epoch: int
    route: str
    token: str
    identity: bytes = b""
    ready: WorkerReady | None = None
    is_admitted: bool = False
    admitted_at: float = 0.0
    is_paused: bool = False
    is_clogged: bool = False  # its socket was full: no new work before it has reported again
    in_flight: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_taken: int = 0
    outstanding: int = 0
    report: Report | None = None

    def assign(self, number: int, cost: int, num_seats: int = 1) -> None:
        """Seats are taken, one per choice. Changes this view."""
        self.in_flight[number] = (cost, num_seats)
        self.num_taken += num_seats
        self.outstanding += cost

    def release(self, number: int, num_emitted: int) -> None:
        """The seats of `number` are free again, of whose cost `num_emitted` had been worked off."""
        cost, num_seats = self.in_flight.pop(number, (0, 0))
        self.num_taken -= num_seats
        self.outstanding = max(0, self.outstanding - max(0, cost - num_emitted)) if self.in_flight else 0

    @property
    def can_answer(self) -> bool:
        """Whether it may be asked what costs no seat."""
        return self.is_admitted and not self.is_clogged and self.ready is not None

    @property
    def can_take(self) -> bool:
        ready = self.ready
        return (
            self.is_admitted
            and not self.is_paused
            and not self.is_clogged
            and ready is not None
            and self.num_taken < ready.num_seats
        )


class ReplicaTable:
    """The replicas by slot and by the routing id of their worker."""

    __slots__ = ("_by_identity", "by_slot")

    def __init__(self) -> None:
        self.by_slot: dict[int, ReplicaView] = {}
        self._by_identity: dict[bytes, ReplicaView] = {}

    def expect(self, order: Expect) -> ReplicaView:
        """A worker of a new epoch may come. Changes the table; returns the view it replaces nothing of."""
        self.forget(order.slot)
        view = ReplicaView(order.slot, order.epoch, order.route, order.token)
        self.by_slot[order.slot] = view
        return view

    def introduce(self, identity: bytes, hello: WorkerHello) -> ReplicaView:
        """Bind a routing id to its slot. Raises ProtocolError unless token, epoch and identity are the expected ones,
        and the token has not been used."""
        view = self.by_slot.get(hello.slot)
        prefix = b"w|%d|%d|" % (hello.slot, hello.epoch)
        if view is None or view.epoch != hello.epoch or not identity.startswith(prefix):
            raise ProtocolError("no worker of this slot and epoch is expected", Code.DENIED)
        if not view.token or view.token != hello.token:
            raise ProtocolError("the token is wrong or used", Code.DENIED)
        view.token = ""
        view.identity = identity
        self._by_identity[identity] = view
        return view

    def of_identity(self, identity: bytes) -> ReplicaView | None:
        return self._by_identity.get(identity)

    def current(self, slot: int, epoch: int) -> ReplicaView | None:
        """The view of this slot if `epoch` is its current one."""
        view = self.by_slot.get(slot)
        return view if view is not None and view.epoch == epoch else None

    def loads(self, route: str) -> list[ReplicaLoad]:
        """Those of this route that may take work, as the router wants them. Changes nothing."""
        loads = []
        for view in self.by_slot.values():
            ready = view.ready
            if view.route == route and ready is not None and view.can_take:
                num_free = ready.num_seats - view.num_taken
                free_tokens = ready.num_blocks * ready.block_size - view.outstanding
                is_idle = not view.in_flight
                loads.append(ReplicaLoad(view.slot, ready.num_seats, num_free, view.outstanding, free_tokens, is_idle))
        return loads

    def forget(self, slot: int) -> None:
        """Its worker is dead, or about to be replaced. Changes the table."""
        view = self.by_slot.pop(slot, None)
        if view is not None:
            self._by_identity.pop(view.identity, None)
