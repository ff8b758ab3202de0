"""What the wire costs: a Channel between two processes, and the codec.

Ceiling: libzmq itself: the same three frames (about 1 kB) over the same ipc:// sockets with bare recv_multipart and
send_multipart, blocking. Per frame libzmq copies the bytes once on each side, per message it may have to wake its other
thread (a system call, some microseconds). Two processes of which one is slower run at the pace of the slower one, so
beside messages/s stands the CPU time of the measured thread: that is what a Channel adds, or saves, to whoever has it.
For the codec: bare msgspec on the same Structs.

    python perf/ipc.py [--quick]
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import uvloop
import zmq

from ipc import codec
from ipc.channel import Channel, Sent
from ipc.messages import Emissions, Generate, GenerateHead, Kind
from perf.report import Spread, alternate, alternate_parts, between, finish, is_quick, per_call_us, table

PAYLOAD = [b"x" * 5, b"y" * 64, b"z" * 1024]
PATIENCE_S = 30


def peer(address: str, orders: Connection) -> None:
    """The other process, bare for all contenders: sends or receives as many messages as it is told."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
    socket.connect(address)
    socket.send_multipart(PAYLOAD)  # so that the other side knows this peer
    while (order := orders.recv()) is not None:
        verb, count = order
        for _ in range(count):
            if verb == "send":
                socket.send_multipart(PAYLOAD)
            else:
                socket.recv_multipart()
        orders.send("done")
    context.destroy(0)


class Meter:
    """Wall time and CPU time of this thread from the first message to the last, per message."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def stop(self, count: int) -> dict[str, float]:
        wall_s, cpu_s = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        return {"cpu_us": cpu_s / count * 1e6, "wall_us": wall_s / count * 1e6, "per_s": count / wall_s}


def receive_bare(socket: "zmq.Socket[bytes]", count: int) -> dict[str, float]:
    socket.recv_multipart()
    meter = Meter()
    for _ in range(count - 1):
        socket.recv_multipart()
    return meter.stop(count - 1)


def receive_channel(socket: "zmq.Socket[bytes]", count: int) -> dict[str, float]:
    async def run() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        channel, done = Channel(socket), loop.create_future()
        meter, seen = Meter(), 0

        def on_frames(_: list[bytes]) -> None:
            nonlocal meter, seen
            seen += 1
            if seen == 1:
                meter = Meter()
            elif seen == count:
                done.set_result(meter.stop(count - 1))

        channel.attach(loop, on_frames)
        async with asyncio.timeout(PATIENCE_S):
            result = await done
        channel.detach()  # the socket is used again by the other contender
        return result  # type: ignore[no-any-return]

    return uvloop.run(run())


def send_bare(socket: "zmq.Socket[bytes]", message: list[bytes], count: int) -> dict[str, float]:
    meter = Meter()
    for _ in range(count):
        socket.send_multipart(message)
    return meter.stop(count)


def send_channel(socket: "zmq.Socket[bytes]", message: list[bytes], count: int) -> dict[str, float]:
    async def run() -> dict[str, float]:
        channel = Channel(socket)
        channel.attach(asyncio.get_running_loop(), lambda _: None)
        await asyncio.sleep(0)
        meter = Meter()
        for _ in range(count):
            if channel.send_nowait(message) is not Sent.YES:
                raise RuntimeError("the benchmark's own socket is full")
        result = meter.stop(count)
        channel.detach()
        return result

    return uvloop.run(run())


def wire(count: int) -> dict[str, dict[str, Spread]]:
    """Both directions, each through a Channel and bare, in turn."""
    with tempfile.TemporaryDirectory(prefix="i-") as directory:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        socket.bind(f"ipc://{directory}/s")
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        other = spawn.Process(target=peer, args=(f"ipc://{directory}/s", theirs), daemon=True)
        other.start()
        identity = socket.recv_multipart()[0]

        def contender(verb: str, measured: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
            def run() -> dict[str, float]:
                ours.send((verb, count))
                told = measured()
                if not ours.poll(PATIENCE_S):
                    raise RuntimeError("the other process did not finish")
                ours.recv()
                return told

            return run

        result = alternate_parts(
            {
                "receive, Channel": contender("send", lambda: receive_channel(socket, count)),
                "receive, bare": contender("send", lambda: receive_bare(socket, count)),
                "send, Channel": contender("receive", lambda: send_channel(socket, [identity, *PAYLOAD], count)),
                "send, bare": contender("receive", lambda: send_bare(socket, [identity, *PAYLOAD], count)),
            },
            3 if is_quick() else 7,
        )
        ours.send(None)
        other.join(5)
        context.destroy(0)
    return result


def compare(num_calls: int, **operations: Callable[[], object]) -> dict[str, float]:
    """Medians of one call, in microseconds."""
    contenders = {
        name: lambda operation=operation: per_call_us(operation, num_calls) for name, operation in operations.items()
    }
    return {name: each["median"] for name, each in alternate(contenders, 5).items()}


def coding() -> dict[str, dict[str, float]]:
    prompt = "x" * 4096
    message = Generate(prompt, max_tokens=200, stop=["a", "b"])
    head = GenerateHead("17", "smollm2", "interactive", "tenant", 5000)
    frames = codec.message(Kind.GENERATE, head, message)
    bare_body, bare_head = msgspec.msgpack.Decoder(Generate), msgspec.msgpack.Decoder(GenerateHead)
    encoder = msgspec.msgpack.Encoder()

    def decode() -> None:
        codec.kind_of(frames)
        codec.decode(frames[1], GenerateHead, "head")
        codec.decode(frames[2], Generate)

    def bare_decode() -> None:
        bare_head.decode(frames[1])
        bare_body.decode(frames[2])

    made = {
        "GENERATE 4 kB": compare(
            5_000,
            encode=lambda: codec.message(Kind.GENERATE, head, message),
            bare_encode=lambda: (encoder.encode(head), encoder.encode(message)),
            decode=decode,
            bare_decode=bare_decode,
        )
    }
    decoder = msgspec.msgpack.Decoder(Emissions)
    for size in (1, 64, 256):
        columns, ones = list(range(100_000, 100_000 + size)), [1] * size
        emissions = Emissions(1, 20_000, 3, columns, ones, columns, ones, [107] * size, [60] * size)
        data = codec.encode(emissions)
        made[f"EMISSIONS {size}"] = compare(
            20_000 // size,
            encode=lambda emissions=emissions: codec.encode(emissions),
            bare_encode=lambda emissions=emissions: encoder.encode(emissions),
            decode=lambda data=data: codec.decode(data, Emissions),
            bare_decode=lambda data=data: decoder.decode(data),
        )
        made[f"EMISSIONS {size}"]["decode_us_per_entry"] = made[f"EMISSIONS {size}"]["decode"] / size
    return made


def main() -> None:
    result = wire(6_000 if is_quick() else 20_000)
    lines: list[list[object]] = []
    for name, each in result.items():
        bare = result[name.split(",")[0] + ", bare"]
        cpu, wall = each["cpu_us"], each["wall_us"]
        ratio = cpu["median"] / bare["cpu_us"]["median"]
        lines.append([name, each["per_s"]["median"], wall["median"], cpu["median"], ratio, between(cpu)])
    table(["1 kB between processes", "messages/s", "wall us", "CPU us", "x bare", "CPU spread"], lines)
    print()
    coded = coding()
    names = ["encode", "bare_encode", "decode", "bare_decode"]
    table(
        ["us", *names, "decode x bare", "decode us/entry"],
        [
            [
                name,
                *(each[column] for column in names),
                each["decode"] / each["bare_decode"],
                each.get("decode_us_per_entry", "-"),
            ]
            for name, each in coded.items()
        ],
    )
    finish("ipc", {"wire": result, "codec_us": coded})


if __name__ == "__main__":
    main()
