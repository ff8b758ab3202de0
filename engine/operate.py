"""Owns what an operator's commands say to a running engine over its admin socket, and how the answer looks.

Knows the wire and the terminal; no front, no supervisor. Called by `engine/cli.py`, imported late.
"""

import fcntl
import os
import time
from collections.abc import Callable

import msgspec
import zmq

from ipc import codec
from ipc.channel import dealer, ipc_address
from ipc.errors import Code, EngineError
from ipc.messages import AdminReply, Drain, Empty, Error, Kind, StatusReport, Stop

ANSWER_S = 5.0
POLL_S = 0.1


class Admin:
    """One connection to an engine's admin socket; use it as a context manager."""

    def __init__(self, run_dir: str, answer_s: float = ANSWER_S) -> None:
        self._address = ipc_address(run_dir, "admin")
        self._answer_s = answer_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context)
        self._socket.connect(self._address)

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def _ask(self, kind: Kind, body: msgspec.Struct) -> codec.Frames:
        self._socket.send_multipart(codec.message(kind, None, body))
        if not self._socket.poll(int(self._answer_s * 1e3), zmq.POLLIN):
            message = f"no engine answers at {self._address} within {self._answer_s:g} s"
            raise EngineError(Code.UNAVAILABLE, message)
        frames = self._socket.recv_multipart()
        if codec.kind_of(frames) is Kind.ERROR:
            error = codec.decode(frames[2], Error)
            raise EngineError(Code(error.code), error.message, error.field)
        return frames

    def status(self) -> StatusReport:
        """The engine's account of itself. Raises EngineError `unavailable` when nobody answers."""
        return codec.decode(self._ask(Kind.STATUS, Empty())[2], StatusReport)

    def drain(self, slot: int = -1) -> AdminReply:
        """Drain one replica, or with -1 the engine, which then exits."""
        return codec.decode(self._ask(Kind.DRAIN, Drain(slot))[2], AdminReply)

    def reload(self) -> AdminReply:
        """Read the configuration again."""
        return codec.decode(self._ask(Kind.RELOAD, Empty())[2], AdminReply)

    def stop(self, now: bool) -> AdminReply:
        """End the engine."""
        return codec.decode(self._ask(Kind.STOP, Stop(now))[2], AdminReply)


def wait(run_dir: str, is_met: Callable[[StatusReport], bool], timeout_s: float) -> StatusReport | None:
    """Ask until `is_met` says yes; None when `timeout_s` passed first. An engine not there yet is waited for."""
    give_up_at = time.monotonic() + timeout_s
    with Admin(run_dir, answer_s=max(0.2, min(ANSWER_S, timeout_s))) as admin:
        while True:
            try:
                report = admin.status()
                if is_met(report):
                    return report
            except EngineError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
            if time.monotonic() >= give_up_at:
                return None
            time.sleep(POLL_S)


def condition(wanted: str) -> Callable[[StatusReport], bool]:
    """READY: all replicas that may serve are; ROUTE=READY: that route has one; STOPPED is for `wait_stopped`."""
    route, _, state = wanted.rpartition("=")
    if state.upper() != "READY":
        raise EngineError(Code.INVALID, f"cannot wait for {wanted!r}: READY or ROUTE=READY", "condition")
    if not route:
        return lambda report: report.state == "ready"
    return lambda report: any(each.route == route and each.is_ready for each in report.routes)


def render_status(report: StatusReport) -> str:
    """The report for a person: a headline, routes, replicas, counters; at most 100 columns."""
    counters = report.counters
    lines = [
        f"engine {report.version}  {report.state}  pid {report.pid}  up {_duration(report.uptime_s)}"
        f"  config {report.config_hash}",
        f"requests  open {counters.num_open}  queued {counters.num_queued}  finished {counters.finished}"
        f"  failed {counters.failed}  cancelled {counters.cancelled}  expired {counters.expired}"
        f"  refused {counters.refused}",
        "",
        render_table(
            ["ROUTE", "STATE", "QUEUED", "RUNNING"],
            [[each.route, each.state, str(each.num_queued), str(each.num_running)] for each in report.routes],
        ),
        "",
        render_table(
            ["SLOT", "ROUTE", "STATE", "PID", "FOR", "BUSY", "BLOCKS FREE", "TOKENS/S", "DEATHS", "REASON"],
            [
                [
                    str(each.slot),
                    each.route,
                    each.state,
                    str(each.pid or "-"),
                    _duration(each.state_s),
                    f"{each.num_in_flight}/{each.num_seats}",
                    f"{each.num_free_blocks}/{each.num_blocks}",
                    f"{each.tokens_per_s:,.0f}",
                    str(each.num_deaths),
                    each.reason,
                ]
                for each in report.replicas
            ],
        ),
    ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"
    return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}m"


def render_table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def wait_stopped(run_dir: str, timeout_s: float) -> bool:
    """True once no engine holds this run directory's lock."""
    give_up_at = time.monotonic() + timeout_s
    while is_locked(run_dir):
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(POLL_S)
    return True


def is_locked(run_dir: str) -> bool:
    """True while an engine holds the run directory. Changes nothing."""
    try:
        lock = os.open(os.path.join(run_dir, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
