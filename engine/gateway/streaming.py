"""Owns the pump of server-sent events: native events in, one write for all that is there, comments while nothing comes.

Knows no endpoint: what events look like is their shape's. Called by the handlers. One timer serves all streams of a
gateway: it wakes those that have been silent, and cuts those whose client does not read.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from engine.config import Http
from engine.gateway.shapes import Shape
from ipc.errors import EngineError
from ipc.messages import FINAL, Event, Finished
from ipc.session import AsyncClient
from ipc.streams import AsyncSink, Options, raise_unless_finished

PING: Final = b": waiting\n\n"
SSE_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(slots=True, eq=False)
class _Open:
    """One stream. `wrote_at` is when something was last sent; `writing_since` is 0 while nothing waits to be read."""

    sink: AsyncSink
    transport: asyncio.Transport
    wrote_at: float
    writing_since: float = 0.0


class Streams:
    """All open streams of a gateway."""

    def __init__(self, client: AsyncClient, config: Http) -> None:
        self._client = client
        self._config = config
        self._open: set[_Open] = set()

    async def watch(self) -> None:
        """Wake and cut. Runs until it is cancelled."""
        config = self._config
        pause_s = min(1.0, max(0.02, min(config.keepalive_s, config.write_s) / 5))
        while True:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            for stream in list(self._open):
                if stream.writing_since:
                    if now - stream.writing_since > config.write_s:
                        stream.transport.abort()  # its handler is cancelled, as when a client goes away
                elif now - stream.wrote_at >= config.keepalive_s - pause_s:
                    stream.wrote_at = now
                    stream.sink.wake()

    async def run(
        self,
        request: web.Request,
        shape: Shape,
        route: str,
        prompts: list[str] | list[str | list[int]],
        options: Options,
        is_detached: bool = False,
    ) -> web.StreamResponse:
        """Ask for every prompt and stream what comes. Raises EngineError for a refusal before the first event."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        sink = AsyncSink()
        stream = _Open(sink, transport, time.monotonic())
        numbers: dict[str, int] = {}
        self._open.add(stream)
        try:
            for number, prompt in enumerate(prompts):
                numbers[await self._client.submit(route, prompt, sink, True, options)] = number
            return await self._pump(request, shape, stream, numbers)
        finally:
            self._open.discard(stream)
            request["tokens"] = shape.num_tokens
            for name in numbers:
                if is_detached:
                    self._client.leave(name)
                else:
                    self._client.cancel_nowait(name)

    async def _pump(
        self, request: web.Request, shape: Shape, stream: _Open, numbers: dict[str, int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**SSE_HEADERS, "x-request-id": request["id"]})
        events = await stream.sink.take()
        if events and isinstance(events[0], FINAL):
            raise_unless_finished(events[0])
        await response.prepare(request)
        num_left, data = len(numbers), shape.start()
        while True:
            for event in events:
                if isinstance(event, FINAL):
                    num_left -= 1
                    if not isinstance(event, Finished):
                        data += _failure(shape, event)
                        num_left = 0
                        break
                data += shape.events(numbers[event.request], event)
                if not num_left:
                    data += shape.finish()
            if data or not events:
                await self._write(response, stream, data or PING)
            if not num_left:
                await response.write_eof()
                return response
            data = b""
            events = await stream.sink.take()

    async def _write(self, response: web.StreamResponse, stream: _Open, data: bytes) -> None:
        stream.writing_since = stream.wrote_at = time.monotonic()  # uvloop's own clock costs a seventh of an event
        await response.write(data)
        stream.writing_since = 0.0


def _failure(shape: Shape, event: Event) -> bytes:
    try:
        raise_unless_finished(event)
    except EngineError as error:
        return shape.fail(error)
    return b""
