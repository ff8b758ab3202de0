"""What a service manager is told, and when: exact, on a clock moved by hand."""

import pytest

from engine.supervisor.herald import EXTEND_EVERY_S, Herald
from ipc.control import Placed
from ipc.messages import ReplicaReport, RouteReport
from tests.fakes import FakeClock

EXTEND = "EXTEND_TIMEOUT_USEC=15000000"


def placed(state: str, replicas: str, *routes: str) -> Placed:
    """`replicas` are their states; `routes` those of the routes, or the engine's state as the only one."""
    reports = [
        ReplicaReport(
            slot=slot,
            route="r",
            state=each,
            epoch=1,
            pid=1,
            devices=[],
            phase="",
            state_s=0.0,
            ready_after_s=0.0,
            num_deaths=0,
            reason="",
        )
        for slot, each in enumerate(replicas.split())
    ]
    told = [RouteReport(f"r{n}", each in {"ready", "degraded"}, each) for n, each in enumerate(routes or [state])]
    return Placed(state, "", told, reports)


def turn(herald: Herald, now: float) -> list[str]:
    """One look with a front that answers at once."""
    number = herald.question(now)
    if number:
        herald.answered(number)
    return herald.pulse(now)


def test_ready_is_said_once_and_states_when_they_change():
    herald = Herald(0.0, 100.0)
    assert herald.observe(placed("starting", "starting starting")) == ["STATUS=loading: 0 of 2 replicas ready"]
    assert herald.observe(placed("starting", "starting starting")) == []
    assert herald.observe(placed("degraded", "ready starting")) == [
        "READY=1",
        "STATUS=degraded: 1 of 2 replicas ready",
    ]
    assert herald.observe(placed("ready", "ready ready")) == ["STATUS=ready: 2 of 2 replicas ready"]
    assert herald.observe(placed("starting", "backoff backoff")) == ["STATUS=loading: 0 of 2 replicas ready"]
    assert herald.observe(placed("ready", "ready ready")) == ["STATUS=ready: 2 of 2 replicas ready"]
    assert herald.stopping() == ["STOPPING=1"]
    assert herald.observe(placed("draining", "ready ready")) == ["STATUS=draining: 2 of 2 replicas ready"]
    assert herald.stopping() == []


def test_an_engine_drained_while_it_loads_never_says_ready():
    herald = Herald(0.0, 100.0)
    assert herald.observe(placed("draining", "ready", "ready")) == [
        "STOPPING=1",
        "STATUS=draining: 1 of 1 replicas ready",
    ]
    assert herald.observe(placed("draining", "ready", "ready")) == []


def test_life_is_shown_at_half_the_watchdog():
    herald, clock = Herald(10.0, 100.0), FakeClock()
    herald.observe(placed("ready", "ready"))
    told = []
    while clock.now() < 125.1:
        if turn(herald, clock.now()):
            told.append(round(clock.now(), 2))
        clock.advance(0.05)
    assert told == pytest.approx([100.0, 105.0, 110.0, 115.0, 120.0, 125.0], abs=0.051)


def test_without_a_turn_of_the_front_there_is_no_life():
    herald = Herald(10.0, 100.0)
    herald.observe(placed("ready", "ready"))
    assert herald.question(100.0) == 1
    assert herald.question(100.05) == 0  # one at a time
    assert [herald.pulse(100.0 + n) for n in range(100)] == [[]] * 100
    herald.answered(1)  # it was only late
    assert herald.pulse(200.0) == ["WATCHDOG=1"]
    assert herald.pulse(200.05) == []
    assert herald.question(204.9) == 0
    assert herald.question(205.0) == 2


def test_no_life_without_a_look():
    """The answer alone tells nothing: the look that follows it does."""
    herald = Herald(10.0, 100.0)
    herald.observe(placed("ready", "ready"))
    herald.answered(herald.question(100.0))
    assert herald.question(300.0) == 0
    assert herald.pulse(300.0) == ["WATCHDOG=1"]
    assert herald.question(304.9) == 0


def test_nobody_watches():
    herald = Herald(0.0, 100.0)
    herald.observe(placed("ready", "ready"))
    assert [herald.question(100.0 + n) for n in range(100)] == [0] * 100


def test_the_start_is_extended_until_ready_and_the_drain_until_the_end():
    herald, clock = Herald(0.0, 100.0), FakeClock()
    herald.observe(placed("starting", "starting"))
    told = []
    for _ in range(32):
        told += turn(herald, clock.now())
        clock.advance(EXTEND_EVERY_S / 8)
    assert told == [EXTEND] * 4
    herald.observe(placed("ready", "ready"))
    assert [turn(herald, clock.advance(1.0)) for _ in range(5)] == [[]] * 5
    herald.stopping()
    assert [turn(herald, clock.advance(1.0)) for _ in range(5)] == [[EXTEND]] * 5


def test_a_start_that_cannot_succeed_is_not_extended():
    herald = Herald(0.0, 100.0)
    herald.observe(placed("failed", "failed starting", "failed", "starting"))
    assert turn(herald, 100.0) == [EXTEND]
    herald.observe(placed("failed", "failed failed", "failed", "failed"))
    assert turn(herald, 110.0) == []


def test_a_reload_is_told_with_its_instant_and_how_it_ended():
    herald = Herald(0.0, 100.0)
    assert herald.reloading(1.5) == herald.reloaded(True) == []  # READY=1 would be a lie
    herald.observe(placed("ready", "ready"))
    assert herald.reloading(123.4567891) == ["RELOADING=1", "MONOTONIC_USEC=123456789"]
    assert herald.reloaded(False) == ["READY=1", "STATUS=ready: 1 of 1 replicas ready; the last reload was refused"]
    assert herald.reloaded(True) == ["READY=1", "STATUS=ready: 1 of 1 replicas ready"]
    herald.stopping()
    assert herald.reloading(2.0) == herald.reloaded(True) == []
