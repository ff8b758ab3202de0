"""What one token event costs the front process, from a worker's frame to the client's socket.

Ceiling: a process that receives the same frames on one ROUTER and sends the same client frames on another, and does
nothing else: no fence, no journal, no sessions. Two shapes, because they stress different things: 256 sockets with one
stream each (a message per token: libzmq rules), and one socket with 256 streams (an entry per token: Python rules).
The figure is the process's own CPU time per entry; workers and clients are other processes.

    python perf/front.py [--quick]
"""

import asyncio
import multiprocessing
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
from engine.serve import quiet_gc
from engine.worker.live import Live, StepEntries
from ipc import codec
from ipc.channel import router
from ipc.control import Admit, Expect, Placed, SaidReady
from ipc.messages import Assign, Generate, GenerateHead, Hello, Kind, RouteReport, WorkerHello, WorkerReady
from perf.report import alternate, finish, is_quick, table

NUM_STREAMS = 256
HWM = 200_000


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
        front.start()
        front.post(Placed("ready", "", [RouteReport("sim", True, "ready")], []))
        front.post(Expect(0, 1, "sim", "t"))
        while True:
            await loop.run_in_executor(None, orders.poll, None)
            if orders.recv() is None:
                return
            orders.send(time.process_time())

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
            orders.send(time.process_time())
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
    """Opens the sessions and the streams, then only drains; answers with how many entries came."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for _ in range(num_sockets):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, HWM)
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
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while (wanted := orders.recv()) is not None:
        seen = 0
        while seen < wanted:
            for socket, _ in poller.poll():
                try:
                    while True:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                        if frames[0] == codec.ENVELOPES[Kind.EVENTS]:
                            seen += NUM_STREAMS // num_sockets  # every message here is a whole step of its session
                except zmq.Again:
                    pass
        orders.send(seen)
    context.destroy(0)


class FakeWorker:
    """Sends the frames of real steps: one Emissions message per session and step."""

    def __init__(self, directory: str, num_sessions: int, is_bare: bool) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, HWM)
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

    def steps(self, count: int) -> list[list[bytes]]:
        """All frames of `count` steps, made before anything is measured."""
        made = []
        for step in range(count):
            by_session: dict[int, StepEntries] = {}
            for live in self.lives:
                entries = by_session.setdefault(live.session, StepEntries(live.session))
                entries.add_delta(live, [65 + step % 26], "x")
            for session, entries in by_session.items():
                frames = entries.frames(1, step)
                if self.is_bare:
                    frames = [(session - 1).to_bytes(4, "little"), codec.ENVELOPES[Kind.EVENTS], *frames[2:]]
                made.append(frames)
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
        if self._clients.recv() != "open":
            raise RuntimeError("the clients did not come up")
        if not is_bare:
            self._worker.take_assignments()
        self._num_steps = num_steps

    def run(self) -> float:
        """CPU microseconds of the process under test per entry."""
        frames = self._worker.steps(self._num_steps)
        wanted = self._num_steps * NUM_STREAMS
        self._front.send("mark")
        before = self._front.recv()
        self._clients.send(wanted)
        for message in frames:
            self._worker.socket.send_multipart(message)
        if not self._clients.poll(60):
            raise RuntimeError("entries are missing")
        self._clients.recv()
        self._front.send("mark")
        return float(self._front.recv() - before) / wanted * 1e6

    def close(self) -> None:
        for pipe in (self._front, self._clients):
            pipe.send(None)
        for process in self._processes:
            process.join(5)
        self._worker.context.destroy(0)
        self._folder.cleanup()


def measure(num_sockets: int, num_steps: int) -> dict[str, dict[str, float]]:
    contenders = {
        "front": Contender(front_process, num_sockets, False, num_steps),
        "bare": Contender(bare_process, num_sockets, True, num_steps),
    }
    try:
        return alternate({name: each.run for name, each in contenders.items()}, 3 if is_quick() else 7)
    finally:
        for each in contenders.values():
            each.close()


def main() -> None:
    many = measure(NUM_STREAMS, 40 if is_quick() else 100)
    one = measure(1, 100 if is_quick() else 400)
    lines, numbers = [], {}
    for name, result in (("256 sockets, 1 stream each", many), ("1 socket, 256 streams", one)):
        front, bare = result["front"], result["bare"]
        ratio = front["median"] / bare["median"]
        lines.append([name, front["median"], bare["median"], ratio, f"{front['low']:.3g}-{front['high']:.3g}"])
        numbers[name] = {
            "front_us": round(front["median"], 3),
            "bare_us": round(bare["median"], 3),
            "x_bare": round(ratio, 3),
        }
    table(["CPU per entry", "front us", "bare us", "x bare", "spread"], lines)
    print("goals: <= 1.6 x bare on 256 sockets; <= 1 us per entry on one")
    finish("front", numbers)


if __name__ == "__main__":
    main()
