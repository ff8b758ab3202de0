"""Owns what is kept of requests that asked for it: their events and their notes, for any session of their tenant.

Pure: knows no socket and no clock. Called by the front actor. Bounded in number and in bytes: what has ended makes
room, oldest first; what still runs is only given up when nothing else is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ipc.errors import Code, EngineError

OVERHEAD_BYTES: Final = 512  # of one item beside its note and its events


@dataclass(slots=True, eq=False)
class Item:
    """One kept request. `state` is that of its end, "" before; `events` are as its client got them."""

    name: str
    tenant: str
    number: int
    note: bytes
    arrived_at: float
    until: float
    events: list[bytes] = field(default_factory=list)
    num_bytes: int = OVERHEAD_BYTES
    state: str = ""


class Shelf:
    """All kept requests of an engine."""

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self.items_max, self.bytes_max = items_max, bytes_max
        self.num_bytes = 0
        self._items: dict[tuple[str, str], Item] = {}  # oldest first
        self._open: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(list(self._items.values()))

    @property
    def is_open(self) -> bool:
        """Whether anything kept still runs."""
        return bool(self._open)

    def put(self, item: Item, now: float) -> None:
        """Keep this from now on. Raises EngineError `duplicate` or `overloaded`."""
        key = item.tenant, item.name
        self.expire(now)
        if key in self._items:
            raise EngineError(Code.DUPLICATE, f"a request {item.name} is kept already", "request")
        item.num_bytes += len(item.note)
        if item.num_bytes > self.bytes_max or not self._make_room(1, item.num_bytes):
            raise EngineError(Code.OVERLOADED, "no room to keep a request", "keep_s", retry_after_s=5.0)
        self._items[key] = item
        self._open[item.number] = item
        self.num_bytes += item.num_bytes

    def append(self, number: int, payload: bytes) -> bool:
        """One more event of a request, if it is kept. False when it had to be given up for want of room."""
        item = self._open.get(number)
        if item is None:
            return True
        if not self._make_room(0, len(payload)):
            self._drop(item)
            return False
        item.events.append(payload)
        item.num_bytes += len(payload)
        self.num_bytes += len(payload)
        return True

    def end(self, number: int, state: str) -> None:
        """A request is over, in this state."""
        item = self._open.pop(number, None)
        if item is not None:
            item.state = state

    def find(self, name: str, tenant: str) -> Item:
        """Raises EngineError `not_found`, for another tenant's too."""
        item = self._items.get((tenant, name))
        if item is None:
            raise EngineError(Code.NOT_FOUND, f"no request {name} is kept", "request")
        return item

    def forget(self, name: str, tenant: str) -> Item:
        """Take it off. Raises EngineError `not_found`."""
        item = self.find(name, tenant)
        self._drop(item)
        return item

    def expire(self, now: float) -> None:
        """Forget what has been kept long enough and has ended."""
        for item in self:
            if item.state and now >= item.until:
                self._drop(item)

    def _make_room(self, num_items: int, num_bytes: int) -> bool:
        """Drop ended items, oldest first, until so much more fits. False when it does not."""
        for item in self:
            if self._fits(num_items, num_bytes):
                return True
            if item.state:
                self._drop(item)
        return self._fits(num_items, num_bytes)

    def _fits(self, num_items: int, num_bytes: int) -> bool:
        return len(self._items) + num_items <= self.items_max and self.num_bytes + num_bytes <= self.bytes_max

    def _drop(self, item: Item) -> None:
        del self._items[item.tenant, item.name]
        self._open.pop(item.number, None)
        self.num_bytes -= item.num_bytes
