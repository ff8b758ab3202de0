"""What the replicas of a route add up to."""

import pytest

from engine.supervisor.deployment import engine_state, route_report
from engine.supervisor.replica import Replica
from engine.supervisor.states import ReplicaState
from ipc.messages import RouteReport


@pytest.mark.parametrize(
    ("states", "expected", "is_ready"),
    [
        ("ready ready", "ready", True),
        ("ready starting", "degraded", True),
        ("ready failed", "degraded", True),
        ("starting backoff", "starting", False),
        ("failed backoff", "starting", False),
        ("failed failed", "failed", False),
        ("failed quarantined", "failed", False),
        ("stopped", "failed", False),
        ("suspect draining", "starting", False),
    ],
)
def test_routes(states: str, expected: str, is_ready: bool):
    replicas = [Replica(slot, "r", slot, state=ReplicaState(name)) for slot, name in enumerate(states.split())]
    report = route_report("r", replicas)
    assert (report.state, report.is_ready) == (expected, is_ready)


@pytest.mark.parametrize(
    ("states", "is_draining", "expected"),
    [
        ("ready ready", False, "ready"),
        ("ready degraded", False, "degraded"),
        ("starting degraded", False, "starting"),
        ("failed ready", False, "failed"),
        ("failed ready", True, "draining"),
    ],
)
def test_the_engine_is_its_worst_route(states: str, is_draining: bool, expected: str):
    assert engine_state([RouteReport("r", True, state) for state in states.split()], is_draining) == expected
