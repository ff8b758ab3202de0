"""Owns how the front process logs: structlog, one line per event, to stderr. Knows no event. Called once at start."""

import logging
import os
import sys

import structlog


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
