"""How the processes log."""

import io
import sys

import pytest
import structlog

from engine.telemetry import configure_logging


class Written(io.StringIO):
    """A stream that keeps each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        self.parts.append(text)
        return len(text)


def test_lines_of_several_processes_do_not_mix(monkeypatch: pytest.MonkeyPatch):
    """With PYTHONUNBUFFERED a line and its end were two writes: another process's line came between them."""
    stream = Written()
    monkeypatch.setattr(sys, "stderr", stream)
    try:
        configure_logging("info")
        structlog.get_logger("test").info("happened", number=3)
    finally:
        structlog.reset_defaults()
    (line,) = stream.parts
    assert line.endswith("level=info event=happened number=3\n")
