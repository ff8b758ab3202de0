"""Owns the mailbox of an actor: typed messages in, one handler per type, timers. Knows no process and no socket.

An actor's state is touched by its own handlers alone. Two actors of one process speak through `post` only, so that
either can move to a process of its own without a change in the other.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

MAILBOX_MAX: Final = 65_536


class MailboxFull(RuntimeError):
    """An actor does not keep up with its mailbox: a fault of ours, never of a client."""


class Actor:
    """Base of Front and Supervisor: a bounded mailbox served on the event loop, in order of arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._mailbox: deque[object] = deque()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_scheduled = False
        self._is_stopped = False

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Serve messages of `kind` with `handler`. Changes the actor only before it gets its first message."""
        self._handlers[kind] = handler

    def post(self, message: object) -> None:
        """Put a message into the mailbox. Raises MailboxFull over MAILBOX_MAX, KeyError for an unknown type."""
        if type(message) not in self._handlers:
            raise KeyError(f"{type(self).__name__} has no handler for {type(message).__name__}")
        if len(self._mailbox) >= MAILBOX_MAX:
            raise MailboxFull(type(self).__name__)
        self._mailbox.append(message)
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        for _ in range(len(self._mailbox)):
            if self._is_stopped:
                return
            message = self._mailbox.popleft()
            self._handlers[type(message)](message)

    def after(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `callback` once, `delay_s` from now, unless the actor has stopped."""

        def fire() -> None:
            self._timers.discard(timer)
            if not self._is_stopped:
                callback()

        timer = self.loop.call_later(delay_s, fire)
        self._timers.add(timer)
        return timer

    def cancel(self, timer: asyncio.TimerHandle) -> None:
        """Take a timer back. Harmless when it has fired."""
        timer.cancel()
        self._timers.discard(timer)

    def every(self, period_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` every `period_s` until the actor stops, also after it has raised."""

        def fire() -> None:
            try:
                callback()
            finally:
                self.after(period_s, fire)

        self.after(period_s, fire)

    def stop_serving(self) -> None:
        """No handler and no timer runs after this."""
        self._is_stopped = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
