"""Owns what a client's caller gets: options, events in order, whole answers, and how a final event becomes an error.

Knows no socket. Called by the asynchronous and the ordinary client, which differ in who waits and how.
"""

import asyncio
import queue
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import msgspec

from ipc.errors import Code, EngineError
from ipc.messages import Cancelled, Delta, Event, Expired, Failed, Finished, Message, Usage


class Options(TypedDict, total=False):
    """What may be asked for beside route and prompt; `ipc/messages.py` has the bounds."""

    max_tokens: int
    min_tokens: int
    seed: int | None
    stop: list[str]
    stop_ids: list[int]
    ignore_eos: bool
    cache_salt: str
    messages: list[Message]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    priority: str
    tenant: str
    deadline_ms: int
    request: str
    traceparent: str


class Completion(msgspec.Struct, frozen=True):
    """A whole answer. `ids` are the output token ids; `reason` is stop or length."""

    request: str
    text: str
    ids: list[int]
    reason: str
    usage: Usage
    seed: int = 0
    matched: str = ""


class Sink(Protocol):
    def put(self, event: Event) -> None: ...
    def size(self) -> int: ...


def raise_unless_finished(event: Event) -> Finished:
    """The final event as a result. Raises EngineError when it is anything but Finished."""
    match event:
        case Finished():
            return event
        case Failed():
            known = event.code if event.code in set(Code) else Code.INTERNAL
            raise EngineError(Code(known), event.message, event.field, event.retry_after_s)
        case Cancelled():
            raise EngineError(Code.CANCELLED, "the request was cancelled")
        case Expired():
            raise EngineError(Code.EXPIRED, "the deadline passed")
        case _:
            raise EngineError(Code.INTERNAL, f"{type(event).__name__} is not a final event")


@dataclass(slots=True)
class Gather:
    """The text and ids of one answer, joined."""

    parts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, Delta | Finished):
            self.parts.append(event.text)
            self.ids += event.ids

    def completion(self, final: Event) -> Completion:
        end = raise_unless_finished(final)
        text = "".join(self.parts)
        return Completion(end.request, text, self.ids, end.reason, end.usage, end.seed, end.matched)


class AsyncSink:
    """Events for a coroutine: a deque and one waiter."""

    __slots__ = ("_waiter", "events")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self.events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def size(self) -> int:
        return len(self.events)

    async def get(self) -> Event:
        while not self.events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.events.popleft()


class ThreadSink:
    """Events for another thread."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def size(self) -> int:
        return self._queue.qsize()

    def get(self) -> Event:
        return self._queue.get()
