"""Owns the client: `AsyncClient`, and `Client`, the same session on a thread of its own for ordinary code.

The public face of `ipc`: what it exports is what programs import. Knows no wire itself.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Final, Self, TypeVar, Unpack

from ipc.channel import Curve, client_address, default_run_dir
from ipc.errors import EngineError
from ipc.messages import FINAL, Event, Model, StatusReport, Tokenize, Tokenized
from ipc.session import HELLO_S, AsyncClient, AsyncStream, ClientStatistics
from ipc.streams import Completion, Options, Stored, ThreadSink

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClientStatistics",
    "Completion",
    "Curve",
    "Options",
    "Stored",
    "Stream",
    "client_address",
    "default_run_dir",
]

CLOSE_S: Final = 1.0
T = TypeVar("T")


class Stream:
    """Events of one request for ordinary code: iterate it; leave it early and the request is cancelled."""

    def __init__(self, client: "Client", request: str, sink: ThreadSink) -> None:
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

    def __init__(
        self, address: str | None = None, *, name: str = "", hello_s: float = HELLO_S, curve: Curve | None = None
    ) -> None:
        """Connects at once. Raises EngineError `unavailable` when nobody answers within `hello_s`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(address, name=name, hello_s=hello_s, curve=curve)
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
        sink = ThreadSink()
        request: str = self._run(self._client.submit, route, prompt, sink, True, options)
        return Stream(self, request, sink)

    def cancel(self, request: str, tenant: str = "") -> None:
        """Ask for an end; the final event tells whether it came in time."""
        self._run(self._client.cancel, request, tenant)

    def fetch(self, request: str, tenant: str = "") -> Stored:
        """What the engine keeps of a request (`keep_s`), from any session of its tenant. Raises EngineError."""
        return self._run(self._client.fetch, request, tenant)

    def forget(self, request: str, tenant: str = "") -> Stored:
        """As `fetch`, for the last time; ends the request if it still runs. Raises EngineError."""
        return self._run(self._client.forget, request, tenant)

    def tokenize(self, route: str, asked: Tokenize) -> Tokenized:
        """Ids of a text or a conversation, or the text of ids. Raises EngineError."""
        return self._run(self._client.tokenize, route, asked)

    def metrics(self) -> bytes:
        """The engine's metrics in Prometheus' text format."""
        return self._run(self._client.metrics)

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
