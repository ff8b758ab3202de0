"""Owns how the front's numbers become a StatusReport. Pure: called by the front actor, changes nothing."""

from collections.abc import Iterable, Mapping

import msgspec

from engine.front.desk import Desk
from engine.front.replicas import ReplicaView
from engine.front.requests import RequestStatistics
from ipc.control import Placed
from ipc.messages import Counters, Model, ModelList, ReplicaReport, StatusReport


def merge(placed: ReplicaReport, view: ReplicaView | None, tokens_per_s: float) -> ReplicaReport:
    """What the supervisor knows of a replica, completed by what the front knows of the same epoch."""
    if view is None or view.epoch != placed.epoch:
        return placed
    ready, told = view.ready, view.report
    changes: dict[str, float] = {"num_in_flight": len(view.in_flight), "tokens_per_s": round(tokens_per_s, 1)}
    if ready is not None:
        changes |= {"num_seats": ready.num_seats, "num_blocks": ready.num_blocks, "is_row_exact": ready.is_row_exact}
        if ready.device:
            placed = msgspec.structs.replace(placed, devices=[ready.device])
    if told is not None:
        changes |= {
            "num_running": told.num_running,
            "num_waiting": told.num_waiting,
            "num_free_blocks": told.num_free_blocks,
            "num_cached_blocks": told.num_cached_blocks,
            "num_preemptions": told.num_preemptions,
            "num_hit_tokens": told.num_hit_tokens,
            "num_tokens": told.num_tokens,
            "num_non_finite": told.num_non_finite,
        }
    elif ready is not None:
        changes["num_free_blocks"] = ready.num_blocks
    return msgspec.structs.replace(placed, **changes)


def models(placed: Placed, views: Iterable[ReplicaView], aliases: Mapping[str, list[str]]) -> ModelList:
    """The routes with what their replicas said about themselves."""
    told = {view.route: view.ready for view in views if view.ready is not None}
    listed = []
    for route in placed.routes:
        ready = told.get(route.route)
        length, version = (ready.max_model_len, ready.version) if ready is not None else (0, "")
        listed.append(Model(route.route, route.is_ready, length, version, aliases.get(route.route, [])))
    return ModelList(listed)


def assemble(
    placed: Placed,
    identity: tuple[str, int, float],
    queued: dict[str, int],
    replicas: tuple[dict[int, ReplicaView], dict[int, float]],
    counted: Counters,
) -> StatusReport:
    """`identity` is (version, pid, uptime in seconds); `replicas` are the views and tokens per second by slot."""
    version, pid, uptime_s = identity
    views, speeds = replicas
    routes = []
    for each in placed.routes:
        num_running = sum(len(view.in_flight) for view in views.values() if view.route == each.route)
        routes.append(msgspec.structs.replace(each, num_queued=queued.get(each.route, 0), num_running=num_running))
    merged = [merge(each, views.get(each.slot), speeds.get(each.slot, 0.0)) for each in placed.replicas]
    return StatusReport(version, placed.state, pid, round(uptime_s, 3), placed.config_hash, routes, merged, counted)


def counters(requests: RequestStatistics, desk: Desk, own: tuple[int, int, int]) -> Counters:
    """`own` is the front's (refused, internal errors, tokens in the journal)."""
    sessions = desk.statistics()
    num_refused, num_internal_errors, journal_tokens = own
    return Counters(
        num_sessions=sessions.num_sessions,
        num_open=requests.num_open,
        num_queued=requests.num_queued,
        accepted=requests.num_accepted,
        refused=num_refused,
        finished=requests.num_finished,
        failed=requests.num_failed,
        cancelled=requests.num_cancelled,
        expired=requests.num_expired,
        tokens=requests.num_tokens,
        stale_entries=requests.num_stale,
        protocol_errors=desk.num_protocol_errors,
        slow_readers=desk.num_slow_readers,
        lost_peers=desk.num_lost_peers,
        internal_errors=num_internal_errors,
        journal_tokens=journal_tokens,
        outbox_bytes=sessions.outbox_bytes,
    )
