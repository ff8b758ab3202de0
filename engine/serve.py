"""Owns how an engine is put together: run directory, sockets, event loop, the two actors, signals, exit code.

The only place that knows both actors. Called by `engine serve`. Everything it opens it closes, also when it fails
half-way; whatever it starts dies with it.
"""

import asyncio
import faulthandler
import os
import signal
import socket
from collections.abc import Callable
from typing import Final

import structlog
import uvloop
import zmq

from engine.clock import MonotonicClock
from engine.config import Config, ConfigError, Http, changes, config_hash
from engine.front.main import Front
from engine.front.zap import Remote, Zap, guard
from engine.keys import Key, read, read_secret
from engine.memory import quiet_gc
from engine.notify import Notifier, from_environment
from engine.run_dir import RunDir
from engine.supervisor.gateways import Gateways
from engine.supervisor.main import Ends, Supervisor
from engine.telemetry import configure_logging
from ipc.channel import Channel, ipc_address, router
from ipc.errors import Code, EngineError
from ipc.messages import AdminReply

ZMQ_MIN: Final = (4, 3, 5)
FRAME_SLACK: Final = 65_536
ADMIN_BYTES_MAX: Final = 65_536
BACKLOG: Final = 2048
WORKER_BYTES_MAX: Final = 64 * 1024 * 1024

log = structlog.get_logger("engine")


def listen(http: Http) -> socket.socket | None:
    """The socket that all gateways accept from, or None without any. Raises EngineError when it cannot be had."""
    if not http.gateways:
        return None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        message = f"{http.host}:{http.port} cannot be listened on: {error.strerror or error}"
        raise EngineError(Code.UNAVAILABLE, message, "http.port") from error
    log.info("http_listening", url=f"http://{http.host}:{made.getsockname()[1]}", gateways=http.gateways)
    return made


def _read_keys(config: Config) -> tuple[dict[str, Key], str]:
    """Who may come by TCP, and this engine's secret; those for HTTP are read to see that they are right.

    Raises ConfigError naming the setting.
    """
    front, http = config.front, config.http
    try:
        if http.gateways and http.api_keys_file:
            read(http.api_keys_file, "http.api_keys_file")
        if not front.tcp:
            return {}, ""
        known = {key.curve: key for key in read(front.curve_keys_file, "front.curve_keys_file") if key.curve}
        return known, read_secret(front.curve_secret_file, "front.curve_secret_file")
    except EngineError as error:
        raise ConfigError(error.message, error.field) from error


class Server:
    """One engine. `run` returns its exit code."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        """`read` reads the configuration again, for a reload."""
        self._config = config
        self._read = read
        self._end: asyncio.Event | None = None
        self._has_stop_signal = False
        self._notifier: Notifier
        self._front: Front
        self._supervisor: Supervisor

    def run(self) -> int:
        """Serve until drained or stopped. Raises EngineError when the run directory cannot be used."""
        if zmq.zmq_version_info() < ZMQ_MIN:
            raise ConfigError(f"libzmq {zmq.zmq_version()} is too old; {'.'.join(map(str, ZMQ_MIN))} is needed")
        configure_logging(self._config.engine.log_level)
        quiet_gc()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._notifier = from_environment()
        run_dir = RunDir(self._config.engine.run_dir)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 65_535)
        listening = None
        try:
            keys = _read_keys(self._config)
            listening = listen(self._config.http)
            return uvloop.run(self._serve(context, listening, keys))
        finally:
            if listening is not None:
                listening.close()
            context.destroy(0)
            run_dir.close()
            self._notifier.close()

    async def _serve(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        listening: socket.socket | None,
        keys: tuple[dict[str, Key], str],
    ) -> int:
        loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        config, clock = self._config, MonotonicClock()
        client = self._bind(context, "client", config.front.body_bytes_max + FRAME_SLACK, config.front.send_hwm)
        worker = self._bind(context, "worker", WORKER_BYTES_MAX, 10_000)
        admin = self._bind(context, "admin", ADMIN_BYTES_MAX, 100)
        remote = self._bind_remote(context, *keys)
        self._front = Front(
            loop, config, (client, worker), clock, lambda message: self._supervisor.post(message), remote
        )
        ends = Ends(self._front.post, self.reload, self._end.set, self._notifier)
        gateways = Gateways(config, listening, clock)
        self._supervisor = Supervisor(loop, config, admin, clock, gateways, ends)
        self._watch_signals(loop)
        log.info("serving", run_dir=config.engine.run_dir, pid=os.getpid(), config=config_hash(config))
        self._front.start()
        self._supervisor.start()
        await self._end.wait()
        self._front.stop()
        self._supervisor.close()
        log.info("ended")
        return 0

    def _bind(
        self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, bytes_max: int, send_hwm: int
    ) -> "zmq.Socket[bytes]":
        socket = router(context, bytes_max, send_hwm)
        socket.bind(ipc_address(self._config.engine.run_dir, name))
        return socket

    def _bind_remote(
        self, context: "zmq.Context[zmq.Socket[bytes]]", keys: dict[str, Key], secret: str
    ) -> Remote | None:
        """The socket for other machines, where one is wanted. Raises EngineError naming the setting."""
        front = self._config.front
        if not front.tcp:
            return None
        zap = Zap(context, keys.keys())
        socket = router(context, front.body_bytes_max + FRAME_SLACK, front.send_hwm)
        guard(socket, secret)
        try:
            socket.setsockopt(zmq.IPV6, int("[" in front.tcp))
            socket.bind(f"tcp://{front.tcp}")
        except zmq.ZMQError as error:
            socket.close(0)
            raise EngineError(Code.UNAVAILABLE, f"{front.tcp} cannot be listened on: {error}", "front.tcp") from error
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        log.info("curve_listening", address=address, public_key=zmq.curve_public(secret.encode()).decode())
        return Remote(Channel(socket, has_users=True), keys, zap)

    def _watch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGTERM, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGINT, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)

    def _on_stop_signal(self) -> None:
        """The first drains, the second stops now. A drain that somebody else asked for goes on at the first."""
        if self._has_stop_signal:
            self._supervisor.stop_now()
        self._has_stop_signal = True
        self._supervisor.drain()

    def _on_reload_signal(self) -> None:
        reply = self.reload()
        (log.info if reply.ok else log.error)("reload", message=reply.message, changed=reply.changed)

    def reload(self) -> AdminReply:
        """Read the configuration again; refused whole when it touches what only a start can change."""
        self._supervisor.reloading()
        reply = self._reread()
        self._supervisor.reloaded(reply.ok)
        return reply

    def _reread(self) -> AdminReply:
        try:
            config = self._read()
        except ConfigError as error:
            return AdminReply(False, f"nothing changed: {error}")
        differing = changes(self._config, config)
        refused = [path for path, applies in differing if applies == "engine"]
        if refused:
            return AdminReply(False, f"nothing changed: {', '.join(refused)} needs a restart of the engine", refused)
        self._config = config
        self._front.post(config)
        self._supervisor.post(config)
        listed = [f"{path} ({applies})" for path, applies in differing]
        return AdminReply(True, f"{len(listed)} settings changed" if listed else "nothing differs", listed)
