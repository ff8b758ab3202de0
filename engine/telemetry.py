"""Owns how the front process logs: structlog, one line per event, to stderr. Knows no event. Called once at start."""

import asyncio
import logging
import os
import sys
from typing import Final

import structlog

LINES_S: Final = 0.05


def configure_logging(level: str) -> None:
    """Key=value lines for people and machines alike; colour only on a terminal. `level` is debug, info, …"""
    is_terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if is_terminal else "iso", utc=not is_terminal),
            structlog.processors.ExceptionRenderer(),
            structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"), pad_event_to=20, sort_keys=False)
            if is_terminal
            else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # One write a line, its end included, unbuffered too: the lines of several processes do not mix.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class Lines:
    """Lines of one frequent event, in the form of all others, for a fifth of their cost: written together soon after.

    Values must need no quotes: no white space, no quotation mark, no equals sign.
    """

    def __init__(self, event: str, level: str, loop: asyncio.AbstractEventLoop) -> None:
        self._event = event
        self._loop = loop
        self._is_on = level in {"debug", "info"}
        self.is_debug = level == "debug"
        self._stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        self._is_terminal = sys.stderr.isatty()
        self._log = structlog.get_logger()
        self._lines: list[str] = []

    def add(self, **fields: object) -> None:
        """One line, at level info."""
        if not self._is_on:
            return
        if self._is_terminal:
            self._log.info(self._event, **fields)
            return
        if not self._lines:
            self._loop.call_later(LINES_S, self.flush)
        stamp = self._stamp(None, "", {})["timestamp"]
        told = " ".join([f"{name}={value}" for name, value in fields.items()])
        self._lines.append(f"timestamp={stamp} level=info event={self._event} {told}\n")

    def flush(self) -> None:
        """Write what is there."""
        if self._lines:
            sys.stderr.write("".join(self._lines))
            sys.stderr.flush()
            self._lines.clear()
