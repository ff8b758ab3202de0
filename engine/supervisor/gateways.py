"""Owns the gateway processes: so many on one listening socket, started again when they end, ended with the engine.

Knows no HTTP and no request. Called by the supervisor actor. The socket is the engine's: while a gateway starts again,
connections wait in it instead of being refused.
"""

import os
import signal
import socket
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from engine.clock import Clock
from engine.config import Config
from engine.supervisor.process import WorkerProcess, spawn

log = structlog.get_logger("supervisor")

MODULE: Final = "engine.gateway.main"
SOCKET_FD: Final = "ENGINE_CHILD_SOCKET_FD"
BACKOFF_S: Final = 0.1
BACKOFF_MAX_S: Final = 10.0
CALM_S: Final = 30.0  # a gateway that ran this long starts again at once


@dataclass(slots=True, eq=False)
class _Gateway:
    index: int
    process: WorkerProcess | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    backoff_s: float = 0.0
    num_starts: int = 0


class Gateways:
    """All gateways of one engine."""

    def __init__(self, config: Config, listening: socket.socket | None, clock: Clock) -> None:
        self._config = config
        self._socket = listening
        self._clock = clock
        count = config.http.gateways if listening is not None else 0
        self._gateways = [_Gateway(index) for index in range(count)]
        self._is_ending = False

    def look(self) -> None:
        """Start what is not running, with a pause that doubles while it keeps ending."""
        now = self._clock.now()
        for gateway in self._gateways:
            if gateway.process is not None:
                status = gateway.process.exit_status()
                if status is None:
                    continue
                gateway.process.close()
                gateway.process = None
                if self._is_ending:
                    continue
                calm = now - gateway.started_at >= CALM_S
                gateway.backoff_s = 0.0 if calm else min(BACKOFF_MAX_S, max(BACKOFF_S, 2 * gateway.backoff_s))
                gateway.start_at = now + gateway.backoff_s
                log.warning("gateway_ended", index=gateway.index, status=status, again_in_s=gateway.backoff_s)
            if not self._is_ending and now >= gateway.start_at:
                self._start(gateway, now)

    def _start(self, gateway: _Gateway, now: float) -> None:
        config = self._config
        assert self._socket is not None  # without it there is no gateway
        environment = {
            **os.environ,
            "ENGINE_CHILD_RUN_DIR": config.engine.run_dir,
            "ENGINE_CHILD_LOG_LEVEL": config.engine.log_level,
            "ENGINE_CHILD_INDEX": str(gateway.index),
            "ENGINE_CHILD_HTTP": msgspec.json.encode(config.http).decode(),
        }
        gateway.started_at = now
        gateway.num_starts += 1
        try:
            gateway.process = spawn(MODULE, environment, self._socket.fileno(), SOCKET_FD)
        except OSError as error:
            gateway.backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_S, 2 * gateway.backoff_s))
            gateway.start_at = now + gateway.backoff_s
            log.warning("gateway_not_started", index=gateway.index, reason=str(error))

    def end(self) -> None:
        """No request is open any more: let them go. Safe to call twice."""
        self._is_ending = True
        for gateway in self._gateways:
            if gateway.process is not None:
                gateway.process.send(signal.SIGTERM)

    def kill(self) -> None:
        """At once."""
        self._is_ending = True
        for gateway in self._gateways:
            if gateway.process is not None:
                gateway.process.send(signal.SIGKILL)

    @property
    def are_gone(self) -> bool:
        return all(gateway.process is None for gateway in self._gateways)

    @property
    def pids(self) -> list[int]:
        return [gateway.process.pid for gateway in self._gateways if gateway.process is not None]
