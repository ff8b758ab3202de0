"""When gateways are started, how long is waited after one that ended, and how they go."""

import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.config import Config, Deployment, Http
from engine.supervisor import gateways as module
from engine.supervisor.gateways import BACKOFF_MAX_S, BACKOFF_S, CALM_S, Gateways
from tests.fakes import FakeClock


class FakeGateway:
    def __init__(self, environment: dict[str, str], fd: int, name: str) -> None:
        self.environment, self.fd, self.name = environment, fd, name
        self.status: int | None = None
        self.signals: list[int] = []
        self.is_closed = False
        self.pid = 1

    def exit_status(self) -> int | None:
        return self.status

    def send(self, number: int) -> None:
        self.signals.append(number)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeGateway]:
    made: list[FakeGateway] = []

    def spawn(_: str, environment: dict[str, str], fd: int, name: str) -> FakeGateway:
        made.append(FakeGateway(environment, fd, name))
        return made[-1]

    monkeypatch.setattr(module, "spawn", spawn)
    return made


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def gateways(listening: socket.socket | None, clock: FakeClock, count: int = 1) -> Gateways:
    config = Config([Deployment("r", runner="sim")], http=Http(gateways=count))
    return Gateways(config, listening, clock)


def test_so_many_on_one_socket(started: list[FakeGateway], listening: socket.socket):
    made = gateways(listening, FakeClock(), 3)
    made.look()
    made.look()
    assert [each.fd for each in started] == [listening.fileno()] * 3
    assert [each.environment["ENGINE_CHILD_INDEX"] for each in started] == ["0", "1", "2"]
    assert msgspec.json.decode(started[0].environment["ENGINE_CHILD_HTTP"], type=Http) == Http(gateways=3)
    assert not made.are_gone


def test_none_without_a_socket(started: list[FakeGateway]):
    made = gateways(None, FakeClock())
    made.look()
    assert (started, made.are_gone) == ([], True)


def test_the_pause_doubles_up_to_its_bound_and_is_forgotten_after_calm(
    started: list[FakeGateway], listening: socket.socket
):
    clock = FakeClock()
    made = gateways(listening, clock)
    made.look()
    pauses = []
    for _ in range(10):
        started[-1].status = 1
        made.look()
        assert started[-1].is_closed
        before, count = clock.now(), len(started)
        while len(started) == count:
            clock.advance(BACKOFF_S / 2)
            made.look()
        pauses.append(round(clock.now() - before, 6))
    doubled = [BACKOFF_S * 2**count for count in range(4)]
    assert pauses[:4] == pytest.approx(doubled, abs=0.6 * BACKOFF_S)
    assert pauses[-1] == pytest.approx(BACKOFF_MAX_S, abs=0.6 * BACKOFF_S)
    clock.advance(CALM_S)
    started[-1].status = -9
    made.look()
    assert len(started) == 12  # at once


def test_a_start_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, started: list[FakeGateway], listening: socket.socket
):
    clock, works = FakeClock(), module.spawn

    def fail(*_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(module, "spawn", fail)
    made = gateways(listening, clock)
    made.look()
    monkeypatch.setattr(module, "spawn", works)
    made.look()
    assert started == []
    clock.advance(BACKOFF_S)
    made.look()
    assert len(started) == 1


def test_they_end_and_stay_ended(started: list[FakeGateway], listening: socket.socket):
    made = gateways(listening, FakeClock(), 2)
    made.look()
    made.end()
    assert [each.signals for each in started] == [[signal.SIGTERM]] * 2
    made.kill()
    assert [each.signals[-1] for each in started] == [signal.SIGKILL] * 2
    started[0].status = started[1].status = 0
    made.look()
    assert (made.are_gone, made.pids, len(started)) == (True, [], 2)
