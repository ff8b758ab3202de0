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
from ipc.messages import (
    FINAL,
    Cancelled,
    Delta,
    Echo,
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Message,
    TokenLogprob,
    Usage,
)


class Options(TypedDict, total=False):
    """What may be asked for beside route and prompt; `ipc/messages.py` has the bounds."""

    max_tokens: int | None
    min_tokens: int
    seed: int | None
    stop: list[str]
    stop_ids: list[int]
    ignore_eos: bool
    cache_salt: str
    messages: list[Message]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    n: int
    logprobs: int | None
    echo: bool
    parse_special: bool
    split_reasoning: bool
    template_args: dict[str, bool | int | float | str | None]
    priority: str
    tenant: str
    tenant_open_max: int
    deadline_ms: int
    request: str
    traceparent: str
    keep_s: float
    detach: bool
    conversation: str
    note: bytes


class Choice(msgspec.Struct, frozen=True):
    """One of several answers."""

    text: str
    ids: list[int]
    reason: str
    matched: str = ""
    logprobs: list[TokenLogprob] = []
    reasoning: str = ""


class Prompt(msgspec.Struct, frozen=True):
    """The prompt, where it was asked for."""

    text: str
    ids: list[int]
    logprobs: list[TokenLogprob] = []


class Completion(msgspec.Struct, frozen=True):
    """A whole answer. `ids` are the output token ids; `reason` is stop or length. These are those of choice 0, and
    `choices` has all of them; `prompt` is there when `echo` asked for it."""

    request: str
    text: str
    ids: list[int]
    reason: str
    usage: Usage
    seed: int = 0
    matched: str = ""
    logprobs: list[TokenLogprob] = []
    choices: list[Choice] = []
    prompt: Prompt | None = None
    reasoning: str = ""


class Stored(msgspec.Struct, frozen=True):
    """What an engine keeps of a request: `state` is queued, running or that of its end; `events` those so far."""

    request: str
    state: str
    age_s: float
    note: bytes
    events: list[Event]

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], FINAL)

    def completion(self) -> Completion:
        """The whole answer. Raises EngineError for every other end, and `unavailable` before there is one."""
        if not self.is_over:
            raise EngineError(Code.UNAVAILABLE, f"request {self.request} is {self.state}", retry_after_s=1.0)
        gather = Gather()
        for event in self.events:
            gather.add(event)
        return gather.completion(self.events[-1])


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
class _Part:
    """One answer in the making."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""
    matched: str = ""

    def add(self, event: Delta | Ended | Finished | Echo) -> None:
        self.texts.append(event.text)
        if not isinstance(event, Echo) and event.reasoning:
            self.thoughts.append(event.reasoning)
        self.ids += event.ids
        self.logprobs += event.logprobs

    def end(self, event: Ended | Finished) -> None:
        self.reason, self.matched = event.reason, event.matched

    def choice(self) -> Choice:
        thoughts = "".join(self.thoughts)
        return Choice("".join(self.texts), self.ids, self.reason, self.matched, self.logprobs, thoughts)


@dataclass(slots=True)
class Gather:
    """The events of one request, joined into its answers."""

    parts: dict[int, _Part] = field(default_factory=dict)
    prompt: _Part | None = None

    def add(self, event: Event) -> None:
        match event:
            case Delta():
                self.parts.setdefault(event.choice, _Part()).add(event)
            case Ended():
                part = self.parts.setdefault(event.choice, _Part())
                part.add(event)
                part.end(event)
            case Echo():
                self.prompt = self.prompt or _Part()
                self.prompt.add(event)
            case Finished():
                part = self.parts.setdefault(0, _Part())
                part.add(event)
                if not part.reason:
                    part.end(event)

    def completion(self, final: Event) -> Completion:
        """All of it. Raises EngineError when the final event is anything but Finished."""
        end = raise_unless_finished(final)
        choices = [part.choice() for _, part in sorted(self.parts.items())]
        first = choices[0]
        prompt = self.prompt
        return Completion(
            end.request,
            first.text,
            first.ids,
            first.reason,
            end.usage,
            end.seed,
            first.matched,
            first.logprobs,
            choices,
            Prompt("".join(prompt.texts), prompt.ids, prompt.logprobs) if prompt is not None else None,
            first.reasoning,
        )


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

    async def take(self) -> deque[Event]:
        """All that is there, at least one; or none, after `wake`."""
        if not self.events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self.events = self.events, deque()
        return taken

    def wake(self) -> None:
        """Let who waits in `take` go on without an event."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
