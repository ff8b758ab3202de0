"""Owns the supervisor actor: it looks at every replica many times a second and does the next small thing.

It decides nothing itself (`replica.py` does) and knows no request. It shares the front's process and loop, and speaks
to the front in messages of `ipc/control.py` alone. It answers the admin socket.
"""

import asyncio
import os
import random
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import structlog
import zmq

from engine.clock import Clock
from engine.config import Config, Deployment, config_hash
from engine.notify import Notifier
from engine.supervisor.deployment import engine_state, route_report
from engine.supervisor.gateways import Gateways
from engine.supervisor.herald import Herald, Lines
from engine.supervisor.process import WorkerProcess, spawn
from engine.supervisor.replica import Action, Move, Replica, RestartPolicy, Seen, Target, apply, decide
from engine.supervisor.states import ReplicaState
from ipc import codec
from ipc.actor import Actor
from ipc.channel import Channel
from ipc.control import (
    Admit,
    Arrived,
    AskStatus,
    Close,
    Drained,
    Emptied,
    Expect,
    Lost,
    Pause,
    Placed,
    SaidReady,
    StatusTold,
    Turn,
    Turned,
)
from ipc.errors import Code, ProtocolError
from ipc.health import Page, PageReader, create
from ipc.messages import AdminReply, Drain, Error, Kind, ReplicaReport, Stop

log = structlog.get_logger("supervisor")

TICK_S: Final = 0.05
PLACED_S: Final = 0.5
WORKER_MODULE: Final = "engine.worker.main"
QUESTIONS_MAX: Final = 256
EXIT_SYSTEM: Final = 71  # what a process that could not be started counts as

_GONE: Final = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED, ReplicaState.BACKOFF, ReplicaState.QUARANTINED})


@dataclass(slots=True, eq=False)
class _Kept:
    """A replica and what belongs to its current process."""

    replica: Replica
    process: WorkerProcess | None = None
    reader: PageReader | None = None
    page_fd: int = -1
    said_ready: bool = False
    is_empty: bool = False
    spawn_error: str = ""


class Ends(NamedTuple):
    """Where the supervisor's words go: `on_end` is called once, when everything has ended."""

    tell_front: Callable[[object], None]
    reload: Callable[[], AdminReply]
    on_end: Callable[[], None]
    notifier: Notifier


class Supervisor(Actor):
    """The control plane."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        socket: zmq.Socket[bytes],
        clock: Clock,
        gateways: Gateways,
        ends: Ends,
    ) -> None:
        super().__init__(loop)
        self._config = config
        self._clock = clock
        self._admin = Channel(socket)
        self._gateways = gateways
        self._tell_front, self._reload, self._on_end, self._notifier = ends
        self._herald = Herald(self._notifier.watchdog_s, clock.now())
        self._kept: list[_Kept] = []
        self._questions: dict[int, bytes] = {}
        self._num_questions = 0
        self._looked_at = clock.now()
        self._state = ""
        self._started_at = clock.now()
        self._is_draining = False
        self._is_stopping = False
        self._has_ended = False
        self._placed_at = 0.0
        for deployment in config.deployment:
            for index in range(deployment.replicas):
                self._kept.append(_Kept(Replica(len(self._kept), deployment.route, index, state_at=clock.now())))
        self.handle(Arrived, self._on_arrived)
        self.handle(SaidReady, self._on_said_ready)
        self.handle(Emptied, self._on_emptied)
        self.handle(Drained, self._on_drained)
        self.handle(StatusTold, self._on_status_told)
        self.handle(Turned, self._on_turned)
        self.handle(Config, self._on_config)

    def start(self) -> None:
        """Begin to look, and to answer the admin socket."""
        self._admin.attach(self.loop, self._on_admin)
        self._look()
        self.every(TICK_S, self._look)

    # Looking.

    def _deployment(self, route: str) -> Deployment:
        return next(each for each in self._config.deployment if each.route == route)

    def _policy(self, route: str) -> RestartPolicy:
        restart, engine = self._deployment(route).restart, self._config.engine
        return RestartPolicy(
            restart.intensity,
            restart.period_s,
            restart.backoff_s,
            restart.backoff_max_s,
            restart.boot_s,
            engine.stop_grace_s,
            engine.drain_s,
        )

    def _look(self) -> None:
        now = self._clock.now()
        lateness_s = max(0.0, now - self._looked_at - 2 * TICK_S)
        self._looked_at = now
        changed = False
        for kept in self._kept:
            changed = self._look_at(kept, now, lateness_s) or changed
        if changed or now - self._placed_at >= PLACED_S:
            self._placed_at = now
            placed = self._placed(now)
            if placed.state != self._state:
                self._state = placed.state
                log.info(f"engine_{placed.state}", after_s=round(now - self._started_at, 2))
            self._tell_front(placed)
            self._say(self._herald.observe(placed))
        self._gateways.look()
        self._pulse(now)
        if self._is_stopping and not self._has_ended and self._all_stopped() and self._gateways.are_gone:
            self._has_ended = True
            self._on_end()

    # What the service manager is told.

    def _say(self, lines: Lines) -> None:
        if lines and self._notifier.is_on:
            self._notifier.tell(lines)

    def _pulse(self, now: float) -> None:
        """A sign of life when one is due. Called by the look, so that without looks there is none."""
        if not self._notifier.is_on:
            return
        lines = self._herald.pulse(now)
        if lines:
            self._notifier.pulse(lines)
        number = self._herald.question(now)
        if number:
            self._tell_front(Turn(number))
        self._notifier.flush()

    def _on_turned(self, turned: Turned) -> None:
        self._herald.answered(turned.number)

    def reloading(self) -> None:
        """The configuration is being read again."""
        self._say(self._herald.reloading(self._clock.now()))

    def reloaded(self, is_applied: bool) -> None:
        """It was read: applied, or refused whole."""
        self._say(self._herald.reloaded(is_applied))

    # Looking at one replica.

    def _look_at(self, kept: _Kept, now: float, lateness_s: float) -> bool:
        """One look at one replica; True when it moved."""
        process, replica = kept.process, kept.replica
        seen = Seen(
            has_process=process is not None or bool(kept.spawn_error),
            exit_status=EXIT_SYSTEM if kept.spawn_error else process.exit_status() if process is not None else None,
            page=Page(reason=kept.spawn_error) if kept.spawn_error else kept.reader.read() if kept.reader else None,
            said_ready=kept.said_ready,
            is_empty=kept.is_empty,
            lateness_s=lateness_s,
        )
        policy = self._policy(replica.route)
        move = decide(replica, seen, policy, now, random.random)
        if move is None:
            return False
        before = replica.state
        apply(replica, move, policy, now)
        self._log(replica, before, move)
        self._do(kept, move)
        return True

    @staticmethod
    def _log(replica: Replica, before: ReplicaState, move: Move) -> None:
        bad = move.to in {ReplicaState.SUSPECT, ReplicaState.BACKOFF, ReplicaState.QUARANTINED, ReplicaState.FAILED}
        told = {"slot": replica.slot, "route": replica.route, "epoch": replica.epoch, "was": before.value}
        if move.reason:
            told["reason"] = move.reason
        event = f"replica_{move.to.value}" if move.to is not before else f"replica_{move.action.value}"
        (log.warning if bad else log.info)(event, **told)

    def _do(self, kept: _Kept, move: Move) -> None:
        replica = kept.replica
        if move.action is Action.SPAWN:
            self._spawn(kept)
        elif move.action is Action.ADMIT:
            self._tell_front(Admit(replica.slot, replica.epoch))
        elif move.action is Action.REAP:
            self._reap(kept, move.reason)
        elif move.action is Action.PAUSE:
            self._tell_front(Pause(replica.slot, replica.epoch))
        elif kept.process is not None:
            if move.action is Action.DUMP:
                self._tell_front(Pause(replica.slot, replica.epoch))
                kept.process.send(signal.SIGUSR1)
            elif move.action is Action.TERMINATE:
                kept.process.send(signal.SIGTERM)
            elif move.action is Action.KILL:
                kept.process.send(signal.SIGKILL)

    def _spawn(self, kept: _Kept) -> None:
        replica = kept.replica
        deployment = self._deployment(replica.route)
        token = secrets.token_hex(16)
        kept.said_ready = kept.is_empty = False
        self._tell_front(Expect(replica.slot, replica.epoch, replica.route, token))
        try:
            kept.page_fd = create(deployment.llm.max_num_seqs, replica.epoch, deployment.restart.boot_s)
            kept.reader = PageReader(kept.page_fd)
            kept.process = spawn(WORKER_MODULE, self._environment(replica, deployment, token), kept.page_fd)
        except OSError as error:  # out of descriptors, memory or processes: a failed start like any other
            kept.spawn_error = f"cannot be started: {error}"
            return
        self.loop.add_reader(kept.process.pidfd, self._look)

    def _environment(self, replica: Replica, deployment: Deployment, token: str) -> Mapping[str, str]:
        return {
            **os.environ,
            "ENGINE_CHILD_RUN_DIR": self._config.engine.run_dir,
            "ENGINE_CHILD_CACHE_DIR": self._config.engine.cache_dir,
            "ENGINE_CHILD_SLOT": str(replica.slot),
            "ENGINE_CHILD_EPOCH": str(replica.epoch),
            "ENGINE_CHILD_INDEX": str(replica.index),
            "ENGINE_CHILD_TOKEN": token,
            "ENGINE_CHILD_DEPLOYMENT": msgspec.json.encode(deployment).decode(),
        }

    def _reap(self, kept: _Kept, reason: str) -> None:
        """The process has ended: nobody may speak for it any more, and nothing of it is kept."""
        self._tell_front(Lost(kept.replica.slot, kept.replica.epoch, reason))
        if kept.process is not None:
            self.loop.remove_reader(kept.process.pidfd)
            kept.process.close()
            kept.process = None
        if kept.reader is not None:
            kept.reader.close()
            kept.reader = None
        if kept.page_fd >= 0:
            os.close(kept.page_fd)
            kept.page_fd = -1
        kept.spawn_error = ""

    # What the front says.

    def _find(self, slot: int, epoch: int) -> _Kept | None:
        kept = self._kept[slot] if 0 <= slot < len(self._kept) else None
        return kept if kept is not None and kept.replica.epoch == epoch else None

    def _on_arrived(self, message: Arrived) -> None:
        log.debug("worker_arrived", slot=message.slot, epoch=message.epoch)

    def _on_said_ready(self, message: SaidReady) -> None:
        kept = self._find(message.slot, message.epoch)
        if kept is not None:
            kept.said_ready = True
            self._look()

    def _on_emptied(self, message: Emptied) -> None:
        kept = self._find(message.slot, message.epoch)
        if kept is not None:
            kept.is_empty = True

    def _on_drained(self, _: Drained) -> None:
        if self._is_draining:
            self._stop_all()

    def _on_status_told(self, told: StatusTold) -> None:
        identity = self._questions.pop(told.question, None)
        if identity is not None:
            self._admin.send_nowait([identity, *codec.message(Kind.STATUS_REPORT, None, told.report)])

    # What an operator says.

    def _on_admin(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            reply = self._answer(identity, frames[1:])
        except ProtocolError as error:
            refusal = Error(error.code, error.message, error.field)
            self._admin.send_nowait([identity, *codec.message(Kind.ERROR, None, refusal)])
        else:
            if reply is not None:
                self._admin.send_nowait([identity, *codec.message(Kind.ADMIN_REPLY, None, reply)])

    def _answer(self, identity: bytes, message: list[bytes]) -> AdminReply | None:
        kind = codec.kind_of(message)
        if len(message) < 3:
            raise ProtocolError("the body frame is missing")
        if kind is Kind.STATUS:
            self._ask_status(identity)
            return None
        if kind is Kind.DRAIN:
            return self._drain(codec.decode(message[2], Drain).slot)
        if kind is Kind.RELOAD:
            return self._reload()
        if kind is Kind.STOP:
            stop = codec.decode(message[2], Stop)
            self.stop_now() if stop.now else self.drain()
            return AdminReply(True, "stopping now" if stop.now else "draining, then stopping")
        raise ProtocolError(f"{kind.name} is not for the admin socket", Code.UNSUPPORTED)

    def _ask_status(self, identity: bytes) -> None:
        if len(self._questions) >= QUESTIONS_MAX:
            raise ProtocolError("too many questions are open", Code.OVERLOADED)
        self._num_questions += 1
        self._questions[self._num_questions] = identity
        self._tell_front(AskStatus(self._num_questions))

    def _drain(self, slot: int) -> AdminReply:
        if slot < 0:
            self.drain()
            return AdminReply(True, "draining, then stopping")
        if slot >= len(self._kept):
            return AdminReply(False, f"there is no slot {slot}; slots are 0 to {len(self._kept) - 1}")
        self._kept[slot].replica.target = Target.STOP
        return AdminReply(True, f"slot {slot} finishes what it has, then stops")

    def _on_config(self, config: Config) -> None:
        """Live settings count from the next look, a replica's own from its next start."""
        self._config = config

    # Ending.

    def drain(self) -> None:
        """Accept nothing new, finish everything, then end. The second call changes nothing."""
        if self._is_draining:
            return
        self._is_draining = True
        self._say(self._herald.stopping())
        self._tell_front(Close())
        self.after(self._config.engine.drain_s, self._stop_all)

    def _stop_all(self) -> None:
        self._is_stopping = True
        self._gateways.end()
        for kept in self._kept:
            kept.replica.target = Target.STOP
            kept.is_empty = True  # drained, or out of time
        self._look()

    def _all_stopped(self) -> bool:
        return all(
            kept.replica.state is ReplicaState.QUARANTINED or (kept.process is None and kept.replica.state in _GONE)
            for kept in self._kept
        )

    def stop_now(self) -> None:
        """Kill every worker and end."""
        log.warning("stopping_now")
        self._say(self._herald.stopping())
        self._gateways.kill()
        for kept in self._kept:
            if kept.process is not None:
                kept.process.send(signal.SIGKILL)
        if not self._has_ended:
            self._has_ended = True
            self._on_end()

    def close(self) -> None:
        """Stop looking, close the admin socket."""
        self.stop_serving()
        self._admin.close()

    # Telling.

    def _placed(self, now: float) -> Placed:
        routes = [
            route_report(each.route, [kept.replica for kept in self._kept if kept.replica.route == each.route])
            for each in self._config.deployment
        ]
        replicas = [self._report(kept, now) for kept in self._kept]
        return Placed(engine_state(routes, self._is_draining), config_hash(self._config), routes, replicas)

    @staticmethod
    def _report(kept: _Kept, now: float) -> ReplicaReport:
        replica = kept.replica
        phase = kept.reader.read().phase.name.lower() if kept.reader is not None else ""
        return ReplicaReport(
            slot=replica.slot,
            route=replica.route,
            state=replica.state.value,
            epoch=replica.epoch,
            pid=kept.process.pid if kept.process is not None else 0,
            devices=replica.devices,
            phase=phase,
            state_s=round(now - replica.state_at, 3),
            ready_after_s=round(replica.ready_after_s, 3),
            num_deaths=replica.num_deaths,
            reason=replica.reason,
        )
