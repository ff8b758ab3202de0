"""What one token event costs the front process, from a worker's frame to the client's socket.

Ceiling: a process that receives the same frames on one ROUTER and sends the same client frames on another, and does
nothing else: no fence, no journal, no sessions. Two shapes, because they stress different things: 256 sockets with one
stream each (a message per token: libzmq rules), and one socket with 256 streams (an entry per token: Python rules).

The figure is the process's own CPU time per entry, and how it divides: the main thread runs Python and hands frames to
libzmq; libzmq's thread makes two system calls per message and peer (a wake-up and a write), which no change to the
front can save. Worker and clients are other processes. As in an engine, the worker is never more than `WINDOW` steps
ahead of what the clients have read: frames that pile up by the thousand fall out of the caches, and cost twice.

    python perf/front.py [--quick] [--profile]
"""

import asyncio
import cProfile
import multiprocessing
import pstats
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import uvloop
import zmq

from engine.clock import MonotonicClock
from engine.config import Config
from engine.front.main import Front
from engine.memory import quiet_gc
from engine.worker.live import Live, StepEntries
from ipc import codec
from ipc.channel import router
from ipc.control import Admit, Expect, Placed, SaidReady
from ipc.messages import Assign, Generate, GenerateHead, Hello, Kind, RouteReport, WorkerHello, WorkerReady
from perf.report import Spread, alternate_parts, between, finish, is_quick, table

NUM_STREAMS = 256
WINDOW = 2
HWM = 200_000
PROFILED_LINES = 22
PATIENCE_S = 20  # what takes longer is lost, not slow


def cpu_us() -> tuple[float, float]:
    """CPU time so far of this process and of the calling thread, in microseconds."""
    return time.process_time() * 1e6, time.thread_time() * 1e6


def front_process(directory: str, orders: Connection) -> None:
    """The real front with a stand-in supervisor; answers a mark with its CPU time so far."""
    tree = {
        "deployment": [{"route": "sim", "queue": {"max_queued": 10_000}}],
        "front": {"send_hwm": HWM, "outbox_messages_max": HWM, "outbox_bytes_max": 2**30, "heartbeat_s": 60},
    }
    config = msgspec.convert(tree, Config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [router(context, 2**26, HWM) for _ in range(2)]
    for socket, name in zip(sockets, ("client", "worker"), strict=True):
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.bind(f"ipc://{directory}/{name}")

    quiet_gc()  # as the engine does

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def supervise(message: object) -> None:
            if isinstance(message, SaidReady):
                front.post(Admit(0, 1))

        front = Front(loop, config, (sockets[0], sockets[1]), MonotonicClock(), supervise)
        front.post(Expect(0, 1, "sim", "t"))
        front.post(Placed("ready", "", [RouteReport("sim", True, "ready")], []))
        await asyncio.sleep(0)  # the mailbox is served before the sockets: the worker may be waiting already
        front.start()
        profile = cProfile.Profile()
        while True:
            await loop.run_in_executor(None, orders.poll, None)
            order = orders.recv()
            if order == "mark":
                orders.send(cpu_us())
            elif order == "profile":
                profile.enable()
                orders.send(None)
            elif order == "told":
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(PROFILED_LINES)
                orders.send(None)
            else:
                return

    uvloop.run(run())
    context.destroy(0)


def bare_process(directory: str, orders: Connection) -> None:
    """Receive on one ROUTER, send on the other; a message's second frame names the client."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client, worker = (router(context, 2**26, HWM) for _ in range(2))
    for socket, name in ((client, "client"), (worker, "worker")):
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.bind(f"ipc://{directory}/{name}")
    known: list[bytes] = []
    poller = zmq.Poller()
    for socket in (client, worker):
        poller.register(socket, zmq.POLLIN)
    poller.register(orders.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if orders.fileno() in ready:
            if orders.recv() is None:
                break
            orders.send(cpu_us())
        if client in ready:
            frames = client.recv_multipart()
            if frames[0] not in known:
                known.append(frames[0])
                client.send_multipart([frames[0], b"ok"])
        if worker in ready:
            try:
                while True:
                    _, which, *rest = worker.recv_multipart(zmq.NOBLOCK)
                    client.send_multipart([known[int.from_bytes(which, "little")], *rest])
            except zmq.Again:
                pass
    context.destroy(0)


def clients_process(directory: str, num_sockets: int, is_bare: bool, orders: Connection) -> None:
    """Opens the sessions and the streams, then only drains: one message per socket and step, acknowledged by a step."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for _ in range(num_sockets):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        socket.connect(f"ipc://{directory}/client")
        socket.send_multipart(codec.message(Kind.HELLO, None, Hello()))
        socket.recv_multipart()
        sockets.append(socket)
    if not is_bare:
        for number in range(NUM_STREAMS):
            head = GenerateHead(str(number), "sim")
            body = Generate("x", max_tokens=1_000_000, seed=1)
            sockets[number % num_sockets].send_multipart(codec.message(Kind.GENERATE, head, body))
    orders.send("open")
    while (num_steps := orders.recv()) is not None:
        for _ in range(num_steps):
            for socket in sockets:
                while socket.recv_multipart()[0] != codec.ENVELOPES[Kind.EVENTS]:
                    pass
            orders.send("step")
    context.destroy(0)


class FakeWorker:
    """Sends the frames of real steps: one Emissions message per session and step."""

    def __init__(self, directory: str, num_sessions: int, is_bare: bool) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, HWM)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        self.socket.setsockopt(zmq.ROUTING_ID, b"w|0|1|x")
        self.socket.connect(f"ipc://{directory}/worker")
        self.is_bare = is_bare
        self.lives = [
            Live(number + 1, 1, number % num_sessions + 1, str(number), None, True) for number in range(NUM_STREAMS)
        ]  # type: ignore[arg-type]
        if is_bare:
            return
        self.socket.send_multipart([codec.ENVELOPES[Kind.WORKER_HELLO], codec.encode(WorkerHello("t", 0, 1, 1))])
        self.socket.send_multipart(
            [codec.ENVELOPES[Kind.WORKER_READY], codec.encode(WorkerReady(1, NUM_STREAMS, 10**9, 16, 10**6))]
        )

    def take_assignments(self) -> None:
        """Every stream, under the numbers the front gave; sessions as the front counts them."""
        self.lives = []
        while len(self.lives) < NUM_STREAMS:
            frames = self.socket.recv_multipart()
            if codec.kind_of(frames) is Kind.ASSIGN:
                assign = codec.decode(frames[1], Assign, "head")
                self.lives.append(Live(assign.number, assign.attempt, assign.session, assign.request, None, True))  # type: ignore[arg-type]

    def steps(self, count: int) -> list[list[list[bytes]]]:
        """The messages of `count` steps, made before anything is measured."""
        made = []
        for step in range(count):
            messages = []
            by_session: dict[int, StepEntries] = {}
            for live in self.lives:
                entries = by_session.setdefault(live.session, StepEntries(live.session))
                entries.add_delta(live, [65 + step % 26], "x")
            for session, entries in by_session.items():
                frames = entries.frames(1, step)
                if self.is_bare:
                    frames = [(session - 1).to_bytes(4, "little"), codec.ENVELOPES[Kind.EVENTS], *frames[2:]]
                messages.append(frames)
            made.append(messages)
        return made


class Contender:
    """One process under test with its worker and its clients."""

    def __init__(self, target: object, num_sockets: int, is_bare: bool, num_steps: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="f-")
        self._front, theirs = spawn.Pipe()
        self._clients, others = spawn.Pipe()
        directory = self._folder.name
        self._processes = [
            spawn.Process(target=target, args=(directory, theirs), daemon=True),  # type: ignore[arg-type]
            spawn.Process(target=clients_process, args=(directory, num_sockets, is_bare, others), daemon=True),
        ]
        for process in self._processes:
            process.start()
        self._worker = FakeWorker(directory, num_sockets, is_bare)
        self._await_clients()
        if not is_bare:
            self._worker.take_assignments()
        self._num_steps = num_steps

    def _ask(self, order: str) -> tuple[float, float]:
        self._front.send(order)
        return self._front.recv()  # type: ignore[no-any-return]

    def _await_clients(self) -> None:
        if not self._clients.poll(PATIENCE_S):
            raise RuntimeError("the clients wait for something that does not come")
        self._clients.recv()

    def run(self) -> dict[str, float]:
        """CPU microseconds per entry of the process under test, and those of its main thread."""
        steps = self._worker.steps(self._num_steps)
        self._clients.send(len(steps))
        before = self._ask("mark")
        started = time.perf_counter()
        for number, messages in enumerate(steps):
            if number >= WINDOW:
                self._await_clients()
            for message in messages:
                self._worker.socket.send_multipart(message)
        for _ in range(min(WINDOW, len(steps))):
            self._await_clients()
        wall_us = (time.perf_counter() - started) * 1e6
        after = self._ask("mark")
        num_entries = len(steps) * NUM_STREAMS
        all_us, main_us = ((after[index] - before[index]) / num_entries for index in range(2))
        return {"all": all_us, "main": main_us, "libzmq": all_us - main_us, "wall": wall_us / num_entries}

    def profile(self) -> None:
        """One run under cProfile, printed by the process itself. It doubles the cost of every call."""
        self._ask("profile")
        self.run()
        self._ask("told")

    def close(self) -> None:
        for pipe in (self._front, self._clients):
            pipe.send(None)
        for process in self._processes:
            process.join(5)
        self._worker.context.destroy(0)
        self._folder.cleanup()


def measure(num_sockets: int, num_steps: int) -> dict[str, dict[str, Spread]]:
    contenders = {
        "front": Contender(front_process, num_sockets, False, num_steps),
        "bare": Contender(bare_process, num_sockets, True, num_steps),
    }
    try:
        for each in contenders.values():
            each.run()  # connections, caches and allocators warm up
        result = alternate_parts({name: each.run for name, each in contenders.items()}, 3 if is_quick() else 7)
        if "--profile" in sys.argv:
            contenders["front"].profile()
        return result
    finally:
        for each in contenders.values():
            each.close()


def main() -> None:
    shapes = {
        "256 sockets, 1 stream each": measure(NUM_STREAMS, 40 if is_quick() else 120),
        "1 socket, 256 streams": measure(1, 150 if is_quick() else 400),
    }
    lines: list[list[object]] = []
    for shape, result in shapes.items():
        for name, parts in result.items():
            medians = [parts[part]["median"] for part in ("all", "main", "libzmq", "wall")]
            ratio = parts["all"]["median"] / result["bare"]["all"]["median"]
            lines.append([shape, name, *medians, ratio, between(parts["all"])])
    header = ["us per entry", "process", "CPU", "main thread", "libzmq thread", "wall", "x bare", "CPU spread"]
    table(header, lines)
    many, one = shapes.values()
    ratio = many["front"]["all"]["median"] / many["bare"]["all"]["median"]
    above = one["front"]["all"]["median"] - one["bare"]["all"]["median"]
    print(f"goals: <= 1.6 x bare on 256 sockets: {ratio:.2f} x; <= 1 us per entry above bare on one: {above:.2f} us")
    finish("front", {"window": WINDOW, "x_bare_many": ratio, "above_bare_one_us": above, **shapes})


if __name__ == "__main__":
    main()
