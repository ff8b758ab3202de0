"""What the engine adds to a token's way, at half load: open-loop arrivals, one replica's steps known exactly.

Ceiling: the fake model's own time, with a host that costs nothing. A replica that is never idle keeps two steps on the
device. A request that arrives at a random moment waits for the rest of the running step, then for the one behind it,
which was filled before it came, and gets its first token at the end of the next: (2 + u) steps, u even between 0 and 1,
so the q-quantile is 2 + q steps. An idle replica takes it at once: one step. Between tokens lies exactly one step. What
is beyond is ours: two sockets there, two back, scheduling, and the waiting for a core. "Added" is the quantile measured
less the same quantile of that ideal; for one stream at a time on an idle engine there is no phase to guess.

Two bare twins tell the machine's share, which no engine of three processes can save. Before each request on the idle
engine a message goes the same way, client to relay to echo and back, through bare sockets. While the load runs, a
process sleeps for a step, over and over: by how much it oversleeps is what happens to anybody at that moment.

    python perf/latency.py [--quick]
"""

import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
import zmq

from ipc.client import AsyncClient, client_address
from ipc.messages import FINAL, Event, Finished
from perf.report import finish, is_quick, quantiles, table
from tests.system.harness import engine, sim_toml

STEP_MS = 15.0
TOKENS = 40
REPLICAS = 4
SEATS = 64
WARM_S = 2.0  # until the replicas are never idle
ORDER = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def sleeper(orders: Connection) -> None:
    """Sleeps steps until told to stop; answers with how much longer each took, in milliseconds."""
    over: list[float] = []
    while not orders.poll(0):
        at = time.perf_counter()
        time.sleep(STEP_MS / 1e3)
        over.append((time.perf_counter() - at) * 1e3 - STEP_MS)
    orders.recv()
    orders.send(over)


def relay(directory: str) -> None:
    """Passes messages between two sockets, bare: where the front stands. Ends with its parent."""
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for socket, name in zip(sockets, "ab", strict=True):
        socket.bind(f"ipc://{directory}/{name}")
    zmq.proxy(*sockets)


def echo(directory: str) -> None:
    """Sends back what it gets, bare: where the worker stands. Ends with its parent."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(f"ipc://{directory}/b")
    while True:
        socket.send_multipart(socket.recv_multipart())


class Ping:
    """The client's end of relay and echo."""

    def __init__(self, directory: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.connect(f"ipc://{directory}/a")
        self.once()  # connects

    def once(self) -> float:
        """Milliseconds there and back."""
        at = time.perf_counter()
        self._socket.send_multipart([b"x" * 5, b"y" * 64, b"z" * 64])
        self._socket.recv_multipart()
        return (time.perf_counter() - at) * 1e3

    def close(self) -> None:
        self._context.destroy(0)


class Timed:
    """A sink that notes when each event came, without a task to wake."""

    def __init__(self, ended: asyncio.Future[Event]) -> None:
        self.instants: list[float] = []
        self._ended = ended

    def put(self, event: Event) -> None:
        self.instants.append(time.perf_counter())
        if isinstance(event, FINAL) and not self._ended.done():
            self._ended.set_result(event)

    def size(self) -> int:
        return 0


class Tally:
    """Times of all requests, in milliseconds."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.late: list[float] = []  # how far the arrivals were behind their own schedule
        self.num_failed = 0

    async def one(self, client: AsyncClient, prompt: str, is_counted: bool) -> None:
        ended: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        sink = Timed(ended)
        asked_at = time.perf_counter()
        await client.submit("sim", prompt, sink, True, {"max_tokens": TOKENS, "ignore_eos": True})
        if not isinstance(await ended, Finished):
            self.num_failed += 1
        elif is_counted:
            self.first.append((sink.instants[0] - asked_at) * 1e3)
            self.gaps += [(later - at) * 1e3 for at, later in zip(sink.instants, sink.instants[1:], strict=False)]


async def idle(client: AsyncClient, ping: Ping, num_requests: int) -> tuple[Tally, list[float]]:
    """One request at a time, and before each a ping."""
    tally, dice = Tally(), random.Random(3)
    pings: list[float] = []
    for number in range(num_requests):
        pings.append(ping.once())
        await tally.one(client, f"alone {number}", True)
        await asyncio.sleep(2 * STEP_MS / 1e3 + dice.random() * STEP_MS / 1e3)  # until the replica is idle again
    return tally, pings


async def half(client: AsyncClient, seconds: float) -> tuple[Tally, dict[str, float]]:
    """Poisson arrivals at half of what the seats can do; arrivals do not wait for answers."""
    rate = 0.5 * REPLICAS * SEATS / (TOKENS * STEP_MS / 1e3)
    tally, dice = Tally(), random.Random(7)
    cpu_s, started = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        due, number = started, 0
        while due < started + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tally.late.append((time.perf_counter() - due) * 1e3)
            group.create_task(tally.one(client, f"request {number}", due > started + WARM_S))
            number += 1
            due += dice.expovariate(rate)
    elapsed_s = time.perf_counter() - started
    return tally, {"requests_per_s": rate, "client_cores": (time.process_time() - cpu_s) / elapsed_s}


async def run(address: str, ping: Ping) -> tuple[Tally, list[float], Tally, dict[str, float]]:
    async with AsyncClient(address, name="perf/latency") as client:
        alone, pings = await idle(client, ping, 10 if is_quick() else 40)
        busy, told = await half(client, 8.0 if is_quick() else 25.0)
    return alone, pings, busy, told


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    toml = sim_toml(replicas=REPLICAS, seats=SEATS, num_blocks=8192, step_ms=STEP_MS)
    with engine(toml) as running, tempfile.TemporaryDirectory(prefix="l-") as directory:
        ours, theirs = spawn.Pipe()
        twins = [
            spawn.Process(target=target, args=(argument,), daemon=True)
            for target, argument in ((relay, directory), (echo, directory), (sleeper, theirs))
        ]
        for twin in twins:
            twin.start()
        ping = Ping(directory)
        running.wait_ready()
        alone, pings, busy, told = uvloop.run(run(client_address(running.run_dir), ping))
        ours.send("stop")
        overslept = quantiles(ours.recv())
        ping.close()
        for twin in twins:
            twin.terminate()
            twin.join(5)
    first = quantiles(busy.first)
    gaps = {"idle": quantiles(alone.gaps), "half load": quantiles(busy.gaps)}
    added = {
        "first token, idle": {name: value - STEP_MS for name, value in quantiles(alone.first).items()},
        "bare: relay and back, idle": quantiles(pings),
        "first token, half load": {name: first[name] - STEP_MS * (2 + order) for name, order in ORDER.items()},
        **{
            f"gap between tokens, {name}": {at: value - STEP_MS for at, value in each.items()}
            for name, each in gaps.items()
        },
        "bare: a sleep of one step": overslept,
    }
    lines: list[list[object]] = [[name, *each.values()] for name, each in added.items()]
    lines.append(["(first token, half load, whole)", *first.values()])
    lines.append(["(its ideal)", *(STEP_MS * (2 + order) for order in ORDER.values())])
    table(["ms added", *ORDER], lines)
    late = quantiles(busy.late)
    print(f"{told['requests_per_s']:.0f} requests/s, {len(busy.gaps):,} gaps, {busy.num_failed} failed")
    print(f"the client used {told['client_cores']:.0%} of one core; its arrivals were {late['p99']:.2f} ms late (p99)")
    finish(
        "latency",
        {**told, "step_ms": STEP_MS, "added_ms": added, "first_ms": first, "late_ms": late, "failed": busy.num_failed},
    )
    if busy.num_failed or alone.num_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
