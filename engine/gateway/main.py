"""Owns the start of a gateway process: tie its life to the engine's, join the front, accept from the shared socket.

Started by module name with its settings in ENGINE_CHILD_* variables. An ordinary client of the front: when the front is
gone, so is this process.
"""

import asyncio
import faulthandler
import os
import signal
import socket
import sys

import msgspec
import structlog
import uvloop
from aiohttp import web

from engine.config import EXIT_CONFIG, Http
from engine.gateway.http import Door, adapt_connections
from engine.gateway.keyring import Keyring
from engine.keys import read
from engine.memory import quiet_gc
from engine.telemetry import Lines, configure_logging
from ipc.channel import ipc_address
from ipc.errors import EngineError
from ipc.parent import guard
from ipc.session import AsyncClient

HELLO_S = 10.0
SHUTDOWN_S = 2.0
LINE_BYTES_MAX = 8190

log = structlog.get_logger("gateway")


async def _serve(config: Http, listening: socket.socket, run_dir: str) -> None:
    """Until told to end. Raises what a watcher raised: without them this gateway would lie, so another takes over."""
    keyring = Keyring(read(config.api_keys_file, "http.api_keys_file") if config.api_keys_file else [])
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with AsyncClient(ipc_address(run_dir, "client"), name="gateway", hello_s=HELLO_S) as client:
        access = Lines("http", os.environ["ENGINE_CHILD_LOG_LEVEL"], loop)
        door = Door(client, config, keyring, access)
        adapt_connections(config.read_s)
        runner = web.AppRunner(
            door.application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            keepalive_timeout=75.0,
        )
        await runner.setup()
        watching = [asyncio.create_task(door.watch()), asyncio.create_task(door.streams.watch())]
        await web.SockSite(runner, listening).start()
        log.info("gateway_serving", pid=os.getpid(), keys=bool(config.api_keys_file))
        telling = asyncio.create_task(ended.wait())
        done, _ = await asyncio.wait([telling, *watching], return_when=asyncio.FIRST_COMPLETED)
        for task in (telling, *watching):
            task.cancel()
        await runner.cleanup()
        access.flush()
        for task in done:
            task.result()


def main() -> int:
    """Run one gateway to its end; returns the exit code."""
    guard()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    configure_logging(os.environ["ENGINE_CHILD_LOG_LEVEL"])
    config = msgspec.json.decode(os.environ["ENGINE_CHILD_HTTP"], type=Http)
    listening = socket.socket(fileno=int(os.environ["ENGINE_CHILD_SOCKET_FD"]))
    quiet_gc()
    try:
        uvloop.run(_serve(config, listening, os.environ["ENGINE_CHILD_RUN_DIR"]))
    except EngineError as error:
        log.error("gateway_failed", reason=str(error))
        return 69 if error.is_retryable else EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
