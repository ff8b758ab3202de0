"""Owns what the replicas of a route add up to: whether it is ready, and what the engine as a whole is.

Pure. Called by the supervisor actor. Ready means that a worker answered; nothing here remembers better days.
"""

from collections.abc import Sequence

from engine.supervisor.replica import Replica
from engine.supervisor.states import ReplicaState
from ipc.messages import RouteReport

SERVING = frozenset({ReplicaState.READY})
HOPELESS = frozenset({ReplicaState.FAILED, ReplicaState.QUARANTINED, ReplicaState.STOPPED})


def route_state(replicas: Sequence[Replica]) -> str:
    """ready: all serve; degraded: some do; starting: none yet; failed: none, and none will by itself."""
    num_ready = sum(replica.state in SERVING for replica in replicas)
    if num_ready == len(replicas):
        return "ready"
    if num_ready:
        return "degraded"
    return "failed" if all(replica.state in HOPELESS for replica in replicas) else "starting"


def route_report(route: str, replicas: Sequence[Replica]) -> RouteReport:
    """The supervisor's part of a route's report."""
    state = route_state(replicas)
    return RouteReport(route, state in {"ready", "degraded"}, state)


def engine_state(routes: Sequence[RouteReport], is_draining: bool) -> str:
    """The worst of the routes: failed, starting, degraded, ready; draining comes before all."""
    if is_draining:
        return "draining"
    states = {route.state for route in routes}
    return next((state for state in ("failed", "starting", "degraded") if state in states), "ready")
