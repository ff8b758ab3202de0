"""Owns the client's end of a session: `AsyncClient`, and `Client`, the same on a thread of its own for ordinary code.

Knows the wire and nothing of what is behind it. Every request ends with exactly one final event, also when the front
dies: then the client says so itself, with the retryable code `unavailable`.
"""

import asyncio
import atexit
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, Self, TypedDict, TypeVar, Unpack

import msgspec
import zmq

from ipc import codec
from ipc.channel import Channel, Sent, dealer, ipc_address
from ipc.errors import Code, EngineError, ProtocolError
from ipc.messages import (
    FINAL,
    Cancelled,
    Delta,
    Empty,
    Error,
    Event,
    Expired,
    Failed,
    Finished,
    Generate,
    GenerateHead,
    Head,
    Hello,
    Kind,
    Model,
    ModelList,
    StatusReport,
    Usage,
    Welcome,
)

HELLO_S: Final = 5.0
CLOSE_S: Final = 1.0
EVENTS_MAX: Final = 65_536  # unread events one stream may hold before it is cut
SEND_RETRY_S: Final = 0.005
T = TypeVar("T")


class Options(TypedDict, total=False):
    """What may be asked for beside route and prompt; `ipc/messages.py` has the bounds."""

    max_tokens: int
    min_tokens: int
    seed: int | None
    stop: list[str]
    stop_ids: list[int]
    ignore_eos: bool
    cache_salt: str
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


class ClientStatistics(msgspec.Struct, frozen=True):
    num_open: int
    num_events: int
    num_sessions: int
    num_protocol_errors: int


class _Sink(Protocol):
    def put(self, event: Event) -> None: ...
    def size(self) -> int: ...


def default_run_dir() -> str:
    """Where an engine of this user listens unless it is told otherwise."""
    if chosen := os.environ.get("ENGINE_RUN_DIR"):
        return chosen
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return str(Path(runtime) / "engine")
    return f"/tmp/engine-{os.getuid()}"


def client_address(run_dir: str | None = None) -> str:
    """Address of the client socket in `run_dir`."""
    return ipc_address(run_dir or default_run_dir(), "client")


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
class _Gather:
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


class _AsyncSink:
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


class _ThreadSink:
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


@dataclass(slots=True)
class _Open:
    """One request that has no final event yet."""

    sink: _Sink
    next_index: int = 0


class AsyncStream:
    """Events of one request, in order; ends after the final one. Leaving it early cancels the request."""

    def __init__(self, client: "AsyncClient", request: str, sink: _AsyncSink) -> None:
        self.request = request
        self._client = client
        self._sink = sink
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        event = await self._sink.get()
        self._is_over = isinstance(event, FINAL)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_over:
            self.cancel()

    def cancel(self) -> None:
        """Ask the engine to stop; the final event still comes."""
        self._client.cancel_nowait(self.request)


class AsyncClient:
    """One session with an engine. Use it as `async with AsyncClient() as client`, on any asyncio loop."""

    def __init__(self, address: str | None = None, *, name: str = "", hello_s: float = HELLO_S) -> None:
        """`address` is a zmq address; None is the engine of this user. Raises EngineError when no path fits."""
        self.address = address or client_address()
        self._name = name
        self._hello_s = hello_s
        self._open: dict[str, _Open] = {}
        self._answers: deque[tuple[Kind, asyncio.Future[codec.Frames]]] = deque()
        self._numbers = itertools.count(1)
        self._welcome: Welcome | None = None
        self._welcomed: asyncio.Future[Welcome] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._channel: Channel | None = None
        self._num_events = self._num_sessions = self._num_protocol_errors = 0

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> Welcome:
        """HELLO, then wait for WELCOME. Raises EngineError `unavailable` after `hello_s`."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._channel = Channel(dealer(self._context))
        self._channel.socket.connect(self.address)
        self._channel.attach(self._loop, self._on_frames)
        self._welcomed = self._loop.create_future()
        self._hello()
        try:
            async with asyncio.timeout(self._hello_s):
                welcome = await self._welcomed
        except TimeoutError:
            await self.close()
            message = f"no WELCOME from {self.address} within {self._hello_s:g} s; is an engine running there?"
            raise EngineError(Code.UNAVAILABLE, message) from None
        except EngineError:
            await self.close()
            raise
        self._heartbeat = self._loop.create_task(self._beat(welcome))
        return welcome

    def _hello(self) -> None:
        self._heard_at = self._loop.time()
        self._send(codec.message(Kind.HELLO, None, Hello(client=self._name)))

    def _send(self, frames: codec.Frames) -> bool:
        """False when the socket is full: the front has stopped reading."""
        if self._channel is None or self._channel.is_closed:
            raise EngineError(Code.UNAVAILABLE, "the client is closed")
        return self._channel.send_nowait(frames) is Sent.YES

    async def _send_soon(self, frames: codec.Frames) -> None:
        """Wait until the socket takes it. Raises EngineError when it does not within `hello_s`."""
        give_up_at = self._loop.time() + self._hello_s
        while not self._send(frames):
            if self._loop.time() > give_up_at:
                raise EngineError(Code.UNAVAILABLE, f"{self.address} does not read")
            await asyncio.sleep(SEND_RETRY_S)

    async def _beat(self, welcome: Welcome) -> None:
        """Ping when due; notice a front that has gone silent."""
        ping = codec.message(Kind.PING, None, Empty())
        while True:
            await asyncio.sleep(welcome.heartbeat_s)
            silent_s = self._loop.time() - self._heard_at
            if silent_s > welcome.heartbeat_s * welcome.heartbeat_misses:
                self._lose(f"nothing heard from {self.address} for {silent_s:.1f} s")
            if self._welcome is None:
                self._hello()
            else:
                self._send(ping)

    def _lose(self, why: str) -> None:
        """The session is gone: end each open request once, then say HELLO again."""
        self._welcome = None
        for request, entry in list(self._open.items()):
            entry.sink.put(Failed(request, Code.UNAVAILABLE.value, why, retry_after_s=1.0))
        self._open.clear()
        while self._answers:
            _, answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(EngineError(Code.UNAVAILABLE, why, retry_after_s=1.0))

    def _on_frames(self, frames: codec.Frames) -> None:
        try:
            kind = codec.kind_of(frames)
            self._heard_at = self._loop.time()
            if kind is Kind.EVENTS:
                self._on_events(codec.decode_events(frames))
            elif kind is Kind.WELCOME:
                self._on_welcome(codec.decode(frames[2], Welcome))
            elif kind is Kind.ERROR:
                self._on_error(codec.decode(frames[2], Error))
            elif kind is not Kind.PONG:
                self._on_answer(kind, frames)
        except (ProtocolError, IndexError) as error:
            # Whose event it was cannot be told: better one clear end for each than a request that waits for ever.
            self._num_protocol_errors += 1
            self._lose(f"the front sent what cannot be read: {error}")

    def _on_welcome(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._num_sessions += 1
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_result(welcome)

    def _on_error(self, error: Error) -> None:
        code = Code(error.code) if error.code in set(Code) else Code.INTERNAL
        refusal = EngineError(code, error.message, error.field, error.retry_after_s)
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(refusal)
        elif code in {Code.NO_SESSION, Code.SLOW_READER}:
            was_standing = self._welcome is not None
            self._lose(error.message)
            if was_standing:
                self._hello()
        elif error.request in self._open and code is not Code.DUPLICATE:
            self._open.pop(error.request).sink.put(
                Failed(error.request, code.value, error.message, error.field, error.retry_after_s)
            )
        elif self._answers and not error.request:
            _, answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(refusal)

    def _on_events(self, events: list[Event]) -> None:
        self._num_events += len(events)
        for event in events:
            entry = self._open.get(event.request)
            if entry is None:
                continue
            entry.sink.put(event)
            if isinstance(event, FINAL):
                del self._open[event.request]
            elif entry.sink.size() >= EVENTS_MAX:
                self._cut(event.request, entry)

    def _cut(self, request: str, entry: _Open) -> None:
        """Its reader does not read: end this stream alone, before memory does."""
        del self._open[request]
        entry.sink.put(Failed(request, Code.SLOW_READER.value, f"{EVENTS_MAX} events were not read"))
        self._send(codec.message(Kind.CANCEL, Head(request), Empty()))

    def _on_answer(self, kind: Kind, frames: codec.Frames) -> None:
        """Answers come in the order of the questions of their kind."""
        for position, (expected, answer) in enumerate(self._answers):
            if expected is kind:
                del self._answers[position]
                if not answer.done():
                    answer.set_result(frames)
                return

    async def submit(self, route: str, prompt: str | list[int], sink: _Sink, is_stream: bool, options: Options) -> str:
        """Send one GENERATE whose events go to `sink`; returns the request's id. Raises EngineError."""
        request = options.get("request") or str(next(self._numbers))
        if request in self._open:
            raise EngineError(Code.DUPLICATE, f"request {request} is still open", "request")
        fields = {name: value for name, value in options.items() if name in Generate.__struct_fields__}
        ordering = {name: value for name, value in options.items() if name in GenerateHead.__struct_fields__}
        unknown = options.keys() - fields.keys() - ordering.keys()
        if unknown:
            raise EngineError(Code.INVALID, f"no such option: {', '.join(sorted(unknown))}", sorted(unknown)[0])
        head = GenerateHead(**{**ordering, "request": request, "route": route})  # type: ignore[arg-type]
        body = Generate(prompt=prompt, stream=is_stream, **fields)  # type: ignore[arg-type]
        if self._welcome is None:
            raise EngineError(Code.UNAVAILABLE, f"no session with {self.address}", retry_after_s=1.0)
        self._open[request] = _Open(sink)
        try:
            await self._send_soon(codec.message(Kind.GENERATE, head, body))
        except BaseException:
            self._open.pop(request, None)
            raise
        return request

    async def stream(self, route: str, prompt: str | list[int], **options: Unpack[Options]) -> AsyncStream:
        """Start a request and get its events as they come. Raises EngineError when it cannot be sent."""
        sink = _AsyncSink()
        request = await self.submit(route, prompt, sink, True, options)
        return AsyncStream(self, request, sink)

    async def generate(self, route: str, prompt: str | list[int], **options: Unpack[Options]) -> Completion:
        """One whole answer. Raises EngineError for every other end; being cancelled cancels the request."""
        sink = _AsyncSink()
        request = await self.submit(route, prompt, sink, False, options)
        gather = _Gather()
        try:
            while True:
                event = await sink.get()
                gather.add(event)
                if isinstance(event, FINAL):
                    return gather.completion(event)
        except asyncio.CancelledError:
            self.cancel_nowait(request)
            raise

    def cancel_nowait(self, request: str) -> None:
        """Ask for an end; the final event tells whether it came in time."""
        if request in self._open:
            self._send(codec.message(Kind.CANCEL, Head(request), Empty()))

    async def cancel(self, request: str) -> None:
        """As `cancel_nowait`, waiting until it is sent."""
        await self._send_soon(codec.message(Kind.CANCEL, Head(request), Empty()))

    async def _ask(self, kind: Kind, answer_kind: Kind) -> codec.Frames:
        answer: asyncio.Future[codec.Frames] = self._loop.create_future()
        self._answers.append((answer_kind, answer))
        await self._send_soon(codec.message(kind, None, Empty()))
        try:
            async with asyncio.timeout(self._hello_s):
                return await answer
        except TimeoutError:
            raise EngineError(Code.UNAVAILABLE, f"no answer from {self.address}") from None

    async def models(self) -> list[Model]:
        """The routes that can be asked for."""
        frames = await self._ask(Kind.MODELS, Kind.MODEL_LIST)
        return codec.decode(frames[2], ModelList).models

    async def status(self) -> StatusReport:
        """The engine's own account of itself."""
        frames = await self._ask(Kind.STATUS, Kind.STATUS_REPORT)
        return codec.decode(frames[2], StatusReport)

    async def close(self) -> None:
        """Say BYE, end what is open, close the socket: within CLOSE_S, whatever the front does. Safe to call twice."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        if self._channel is not None and not self._channel.is_closed:
            with suppress(EngineError):
                self._send(codec.message(Kind.BYE, None, Empty()))
            self._lose("the client was closed")
            self._channel.close()
        if self._context is not None:
            context, self._context = self._context, None
            # term() waits for the linger of the sockets: bounded, but not on the loop's thread.
            await asyncio.get_running_loop().run_in_executor(None, context.destroy, 0)

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(len(self._open), self._num_events, self._num_sessions, self._num_protocol_errors)


class Stream:
    """Events of one request for ordinary code: iterate it; leave it early and the request is cancelled."""

    def __init__(self, client: "Client", request: str, sink: _ThreadSink) -> None:
        self.request = request
        self._client = client
        self._sink = sink
        self._is_over = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._is_over:
            raise StopIteration
        event = self._sink.get()
        self._is_over = isinstance(event, FINAL)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_over:
            self.cancel()

    def cancel(self) -> None:
        """Ask the engine to stop; the final event still comes."""
        self._client.cancel(self.request)


class Client:
    """The same session for ordinary code; safe to use from several threads. `with Client() as client: …`"""

    def __init__(self, address: str | None = None, *, name: str = "", hello_s: float = HELLO_S) -> None:
        """Connects at once. Raises EngineError `unavailable` when nobody answers within `hello_s`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(address, name=name, hello_s=hello_s)
        atexit.register(self.close)
        try:
            self._run(self._client.connect)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: Callable[..., "asyncio.Future[T] | object"], *arguments: object) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(operation(*arguments), self._loop)  # type: ignore[arg-type]
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def generate(self, route: str, prompt: str | list[int], **options: Unpack[Options]) -> Completion:
        """One whole answer. Raises EngineError for every other end."""

        async def whole() -> Completion:
            return await self._client.generate(route, prompt, **options)

        return self._run(whole)

    def stream(self, route: str, prompt: str | list[int], **options: Unpack[Options]) -> Stream:
        """Start a request and iterate its events as they come."""
        sink = _ThreadSink()
        request: str = self._run(self._client.submit, route, prompt, sink, True, options)
        return Stream(self, request, sink)

    def cancel(self, request: str) -> None:
        """Ask for an end; the final event tells whether it came in time."""
        self._run(self._client.cancel, request)

    def models(self) -> list[Model]:
        """The routes that can be asked for."""
        return self._run(self._client.models)

    def status(self) -> StatusReport:
        """The engine's own account of itself."""
        return self._run(self._client.status)

    def close(self) -> None:
        """End the session within CLOSE_S. Safe to call twice, and called at exit."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        atexit.unregister(self.close)
        with suppress(TimeoutError, CancelledError, EngineError):
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def statistics(self) -> ClientStatistics:
        return self._client.statistics()
