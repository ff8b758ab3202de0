"""Owns one session with an engine, on an asyncio loop: HELLO, heartbeats, requests, events, and its loss.

Knows the wire and nothing of what is behind it. Every request ends with exactly one final event, also when the front
dies: then the session says so itself, with the retryable code `unavailable`. `ipc/client.py` is the public face.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self, Unpack

import msgspec
import zmq

from ipc import codec
from ipc.channel import Channel, Curve, Sent, client_address, dealer
from ipc.errors import Code, EngineError, ProtocolError
from ipc.messages import (
    FINAL,
    SAID,
    Counts,
    Delta,
    Empty,
    Ended,
    Error,
    Event,
    Failed,
    Finished,
    Generate,
    GenerateHead,
    Head,
    Hello,
    Kind,
    Model,
    ModelList,
    OwnerHead,
    RouteHead,
    StatusReport,
    Tokenize,
    Tokenized,
    Welcome,
)
from ipc.streams import AsyncSink, Completion, Gather, Options, Sink, Stored

HELLO_S: Final = 5.0
EVENTS_MAX: Final = 65_536  # unread events one stream may hold before it is cut
SEND_RETRY_S: Final = 0.005
_FIELDS: Final = frozenset(Generate.__struct_fields__)
_ORDERING: Final = frozenset(GenerateHead.__struct_fields__)


class ClientStatistics(msgspec.Struct, frozen=True):
    num_open: int
    num_events: int
    num_sessions: int
    num_protocol_errors: int


@dataclass(slots=True)
class _Open:
    """One request that has no final event yet."""

    sink: Sink
    next_indexes: dict[int, int] = field(default_factory=dict)  # by choice

    def is_next(self, event: Delta | Ended | Finished) -> bool:
        """Whether its tokens follow those that came before. Changes what comes next."""
        choice = 0 if isinstance(event, Finished) else event.choice
        expected = self.next_indexes.get(choice, 0)
        self.next_indexes[choice] = expected + len(event.ids)
        return event.index == expected


def _encode(message: msgspec.Struct) -> bytes:
    """As `codec.encode`. Raises EngineError naming the field that has no form on the wire."""
    try:
        return codec.encode(message)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        for name in message.__struct_fields__:
            try:
                codec.encode({name: getattr(message, name)})
            except (OverflowError, TypeError, UnicodeEncodeError):
                raise EngineError(Code.INVALID, f"{name}: {error}", name) from error
        raise


class AsyncStream:
    """Events of one request, in order; ends after the final one. Leaving it early cancels the request."""

    def __init__(self, client: "AsyncClient", request: str, sink: AsyncSink) -> None:
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

    def __init__(
        self, address: str | None = None, *, name: str = "", hello_s: float = HELLO_S, curve: Curve | None = None
    ) -> None:
        """`address` is a zmq address; None is the engine of this user. Over tcp:// an engine wants `curve` keys.

        Raises EngineError when no path fits.
        """
        self.address = address or client_address()
        self._name = name
        self._hello_s = hello_s
        self._curve = curve
        self._open: dict[str, _Open] = {}
        self._answers: deque[tuple[Kind, asyncio.Future[codec.Frames]]] = deque()
        self._asks: dict[str, asyncio.Future[codec.Frames]] = {}
        self._numbers = itertools.count(1)
        self._welcome: Welcome | None = None
        self._welcomed: asyncio.Future[Welcome] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._channel: Channel | None = None
        self._monitor: Channel | None = None
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
        self._channel = Channel(dealer(self._context, curve=self._curve))
        self._channel.socket.connect(self.address)
        self._channel.attach(self._loop, self._on_frames)
        self._monitor = Channel(self._channel.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        self._monitor.attach(self._loop, self._on_disconnected)
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
        waiting: list[asyncio.Future[Any]] = [*(answer for _, answer in self._answers), *self._asks.values()]
        self._answers.clear()
        self._asks.clear()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineError(Code.UNAVAILABLE, why, retry_after_s=1.0))

    def _on_disconnected(self, _: codec.Frames) -> None:
        """The connection is gone, and with it the session: a front that comes back does not know us."""
        if self._welcome is not None:
            self._lose(f"the front at {self.address} is gone")
            self._hello()

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
            elif kind in {Kind.TOKENIZED, Kind.KEPT}:
                ask = self._asks.pop(codec.decode(frames[1], Head, "head").request, None)
                if ask is not None and not ask.done():
                    ask.set_result(frames)
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
        elif error.request in self._asks:
            ask = self._asks.pop(error.request)
            if not ask.done():
                ask.set_exception(refusal)
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
            if isinstance(event, SAID) and not entry.is_next(event):
                self._cut(event.request, entry, Code.INTERNAL, "tokens of this stream were lost or doubled")
                continue
            entry.sink.put(event)
            if isinstance(event, FINAL):
                del self._open[event.request]
            elif entry.sink.size() >= EVENTS_MAX:
                self._cut(event.request, entry, Code.SLOW_READER, f"{EVENTS_MAX} events were not read")

    def _cut(self, request: str, entry: _Open, code: Code, why: str) -> None:
        """End this stream alone, here and at the engine."""
        del self._open[request]
        entry.sink.put(Failed(request, code.value, why))
        self._send(codec.message(Kind.CANCEL, OwnerHead(request), Empty()))

    def _on_answer(self, kind: Kind, frames: codec.Frames) -> None:
        """Answers come in the order of the questions of their kind."""
        for position, (expected, answer) in enumerate(self._answers):
            if expected is kind:
                del self._answers[position]
                if not answer.done():
                    answer.set_result(frames)
                return

    async def submit(self, route: str, prompt: str | list[int], sink: Sink, is_stream: bool, options: Options) -> str:
        """Send one GENERATE whose events go to `sink`; returns the request's id. Raises EngineError."""
        request = options.get("request") or str(next(self._numbers))
        if request in self._open:
            raise EngineError(Code.DUPLICATE, f"request {request} is still open", "request")
        fields = {name: value for name, value in options.items() if name in _FIELDS}
        ordering = {name: value for name, value in options.items() if name in _ORDERING}
        unknown = options.keys() - fields.keys() - ordering.keys() - {"note"}
        if unknown:
            raise EngineError(Code.INVALID, f"no such option: {', '.join(sorted(unknown))}", sorted(unknown)[0])
        head = GenerateHead(**{**ordering, "request": request, "route": route})  # type: ignore[arg-type]
        generate = Generate(prompt=prompt, stream=is_stream, **fields)  # type: ignore[arg-type]
        body = _encode(generate)
        note = options.get("note", b"")
        message = [codec.ENVELOPES[Kind.GENERATE], _encode(head), body, *([note] if note else [])]
        try:
            codec.decode(message[1], GenerateHead, "request")
            codec.decode(body, Generate, "request")
        except ProtocolError as error:
            raise EngineError(Code.INVALID, error.message, error.field) from error
        if self._welcome is None:
            raise EngineError(Code.UNAVAILABLE, f"no session with {self.address}", retry_after_s=1.0)
        if max(len(body), len(note)) > self._welcome.body_bytes_max:  # the front would have to cut the connection
            told = f"the request has {max(len(body), len(note))} bytes, {self._welcome.body_bytes_max} are allowed"
            raise EngineError(Code.TOO_LARGE, told, "body")
        self._open[request] = _Open(sink)
        try:
            await self._send_soon(message)
        except BaseException:
            self._open.pop(request, None)
            raise
        return request

    async def stream(self, route: str, prompt: str | list[int], **options: Unpack[Options]) -> AsyncStream:
        """Start a request and get its events as they come. Raises EngineError when it cannot be sent."""
        sink = AsyncSink()
        request = await self.submit(route, prompt, sink, True, options)
        return AsyncStream(self, request, sink)

    async def generate(self, route: str, prompt: str | list[int], **options: Unpack[Options]) -> Completion:
        """One whole answer. Raises EngineError for every other end; being cancelled cancels the request."""
        sink = AsyncSink()
        request = await self.submit(route, prompt, sink, False, options)
        gather = Gather()
        try:
            while True:
                event = await sink.get()
                gather.add(event)
                if isinstance(event, FINAL):
                    return gather.completion(event)
        except asyncio.CancelledError:
            self.cancel_nowait(request)
            raise

    def leave(self, request: str) -> None:
        """Read no more of a request that runs on by itself (`detach`): what still comes of it is dropped."""
        self._open.pop(request, None)

    def cancel_nowait(self, request: str) -> None:
        """Ask for an end; the final event tells whether it came in time."""
        if request in self._open:
            self._send(codec.message(Kind.CANCEL, OwnerHead(request), Empty()))

    async def cancel(self, request: str, tenant: str = "") -> None:
        """As `cancel_nowait`, waiting until it is sent; a kept request of this tenant may be another session's."""
        await self._send_soon(codec.message(Kind.CANCEL, OwnerHead(request, tenant), Empty()))

    async def fetch(self, request: str, tenant: str = "") -> Stored:
        """What the engine keeps of a request (`keep_s`), from any session of its tenant. Raises EngineError."""
        return await self._fetch(Kind.FETCH, request, tenant)

    async def forget(self, request: str, tenant: str = "") -> Stored:
        """As `fetch`, for the last time; ends the request if it still runs. Raises EngineError."""
        return await self._fetch(Kind.FORGET, request, tenant)

    async def _fetch(self, kind: Kind, request: str, tenant: str) -> Stored:
        frames = await self._question(request, codec.message(kind, OwnerHead(request, tenant), Empty()))
        kept, note, events = codec.decode_kept(frames)
        return Stored(request, kept.state, kept.age_s, note, events)

    async def _question(self, name: str, message: codec.Frames) -> codec.Frames:
        """The answer whose head has this name: one at a time. Raises EngineError."""
        while name in self._asks:
            await asyncio.wait([self._asks[name]])
        answer: asyncio.Future[codec.Frames] = self._loop.create_future()
        self._asks[name] = answer
        try:
            await self._send_soon(message)
            async with asyncio.timeout(self._hello_s):
                return await answer
        except TimeoutError:
            raise EngineError(Code.UNAVAILABLE, f"no answer from {self.address}", retry_after_s=1.0) from None
        finally:
            if self._asks.get(name) is answer:
                del self._asks[name]

    async def _ask(self, kind: Kind, answer_kind: Kind) -> codec.Frames:
        answer: asyncio.Future[codec.Frames] = self._loop.create_future()
        self._answers.append((answer_kind, answer))
        await self._send_soon(codec.message(kind, None, Empty()))
        try:
            async with asyncio.timeout(self._hello_s):
                return await answer
        except TimeoutError:
            raise EngineError(Code.UNAVAILABLE, f"no answer from {self.address}") from None

    async def tokenize(self, route: str, asked: Tokenize) -> Tokenized:
        """Ids of a text or a conversation, or the text of ids. Raises EngineError."""
        request = f"?{next(self._numbers)}"
        frames = await self._question(request, codec.message(Kind.TOKENIZE, RouteHead(request, route), asked))
        return codec.decode(frames[2], Tokenized)

    async def metrics(self) -> bytes:
        """The engine's metrics in Prometheus' text format."""
        frames = await self._ask(Kind.METRICS, Kind.METRICS_TEXT)
        return frames[2]

    def count(self, counts: Counts) -> None:
        """Tell the engine what was answered on its behalf; lost when it does not read."""
        self._send(codec.message(Kind.COUNT, None, counts))

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
            if self._monitor is not None:
                self._monitor.detach()
                self._channel.socket.disable_monitor()
            self._channel.close()
        if self._context is not None:
            context, self._context = self._context, None
            # term() waits for the linger of the sockets: bounded, but not on the loop's thread.
            await asyncio.get_running_loop().run_in_executor(None, context.destroy, 0)

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(len(self._open), self._num_events, self._num_sessions, self._num_protocol_errors)
