"""A gateway ends when it is told to, and when what watches over its truth has ended."""

import asyncio
import os
import signal
import socket
from typing import Any, Self

import pytest

from engine.config import Http
from engine.gateway import main
from engine.gateway.http import Door


class NoClient:
    """A session that stands and says nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENGINE_CHILD_LOG_LEVEL", "error")
    monkeypatch.setattr(main, "AsyncClient", NoClient)
    monkeypatch.setattr(main, "adapt_connections", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def test_a_watcher_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch, listening: socket.socket):
    """It went on with a snapshot that nobody renewed: not ready for ever, and never started again."""

    async def fail(_: Door) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Door, "watch", fail)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(asyncio.wait_for(main._serve(Http(), listening, "/tmp"), 10))


def test_a_signal_ends_it(monkeypatch: pytest.MonkeyPatch, listening: socket.socket):
    async def watch(_: Door) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(Door, "watch", watch)
    asyncio.run(asyncio.wait_for(main._serve(Http(), listening, "/tmp"), 10))
