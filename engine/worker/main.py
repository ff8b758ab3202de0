"""Owns the start of a worker process: tie its life to the front's, load, warm up, say READY, hand over to the loop.

Started by module name with its settings in ENGINE_CHILD_* variables; reads no configuration file. Imports no torch
unless its runner does.
"""

import faulthandler
import os
import secrets
import signal
import sys
import threading
import traceback
from types import FrameType

import msgspec
import zmq

from engine.config import EXIT_CONFIG, Deployment
from engine.llm.blocks import BlockPool
from engine.llm.scheduler import Limits, Scheduler
from engine.memory import quiet_gc
from engine.worker.load import load
from engine.worker.loaded import Loaded
from engine.worker.loop import LoopSettings, WorkerLoop
from ipc import codec
from ipc.channel import Channel, dealer, ipc_address
from ipc.errors import EngineError
from ipc.health import PageWriter, Phase
from ipc.messages import Kind, WorkerHello, WorkerReady
from ipc.parent import guard

EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70


class _Settings(msgspec.Struct, frozen=True):
    run_dir: str
    slot: int
    epoch: int
    index: int
    token: str
    page_fd: int
    deployment: Deployment
    cache_dir: str


def _settings() -> _Settings:
    """What the supervisor put into this process's environment."""
    named = {name: os.environ[f"ENGINE_CHILD_{name}"] for name in ("RUN_DIR", "TOKEN", "DEPLOYMENT")}
    numbers = {name: int(os.environ[f"ENGINE_CHILD_{name}"]) for name in ("SLOT", "EPOCH", "INDEX", "PAGE_FD")}
    return _Settings(
        named["RUN_DIR"],
        numbers["SLOT"],
        numbers["EPOCH"],
        numbers["INDEX"],
        named["TOKEN"],
        numbers["PAGE_FD"],
        msgspec.json.decode(named["DEPLOYMENT"], type=Deployment),
        os.environ["ENGINE_CHILD_CACHE_DIR"],
    )


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", settings: _Settings) -> Channel:
    """The socket to the front, introduced with the one-time token."""
    identity = b"w|%d|%d|%s" % (settings.slot, settings.epoch, secrets.token_hex(8).encode())
    channel = Channel(dealer(context, identity=identity))
    channel.socket.connect(ipc_address(settings.run_dir, "worker"))
    hello = WorkerHello(settings.token, settings.slot, settings.epoch, os.getpid())
    channel.send_nowait([codec.ENVELOPES[Kind.WORKER_HELLO], codec.encode(hello)])
    return channel


def _ready(settings: _Settings, loaded: Loaded) -> list[bytes]:
    llm = settings.deployment.llm
    ready = WorkerReady(
        settings.epoch,
        llm.max_num_seqs,
        loaded.num_blocks,
        llm.block_size,
        llm.max_model_len,
        loaded.version,
        loaded.is_row_exact,
        loaded.device,
    )
    return [codec.ENVELOPES[Kind.WORKER_READY], codec.encode(ready)]


def _run(settings: _Settings, page: PageWriter) -> None:
    deployment = settings.deployment
    llm, boot_s, floor_s = deployment.llm, deployment.restart.boot_s, deployment.restart.hang_floor_s
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = _connect(context, settings)
    phases = {"loading": Phase.LOADING, "warming": Phase.WARMING}
    page.enter(Phase.LOADING, boot_s)
    loaded = load(deployment, settings.index, settings.cache_dir, lambda name: page.enter(phases[name], boot_s))
    scheduler = Scheduler(
        Limits(llm.max_num_seqs, llm.max_batched_tokens, llm.max_model_len),
        BlockPool(loaded.num_blocks, llm.block_size, llm.prefix_cache),
    )
    loop = WorkerLoop(channel, page, scheduler, loaded, LoopSettings(settings.epoch, loaded.overlap, floor_s))
    page.enter(Phase.IDLE, floor_s)
    channel.send_nowait(_ready(settings, loaded))
    if deployment.sim.exit_after_s:
        threading.Timer(deployment.sim.exit_after_s, os._exit, (EXIT_INTERNAL,)).start()
    quiet_gc()
    loop.run()
    channel.close()
    context.term()


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(0)


def main() -> int:
    """Run one worker to its end; returns the exit code."""
    guard()  # before anything that takes time: from here on this process dies with its parent
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGTERM, _leave)  # until the loop runs there is nothing to finish
    settings = _settings()
    page = PageWriter(settings.page_fd)
    try:
        _run(settings, page)
    except EngineError as error:
        page.crash(str(error))
        sys.stderr.write(f"worker {settings.slot}: {error}\n")
        return EXIT_UNAVAILABLE if error.is_retryable else EXIT_CONFIG
    except Exception as error:  # noqa: BLE001 - the boundary at the top of main
        page.crash(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return EXIT_INTERNAL
    return 0


if __name__ == "__main__":
    sys.exit(main())
