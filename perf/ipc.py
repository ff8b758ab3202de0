"""What the wire costs: a Channel between two processes, and the codec.

Ceiling: libzmq itself: the same frames over the same kind of socket with bare send_multipart and recv_multipart. The
loop adds a callback per wake-up and a look at EVENTS after a send. For the codec: bare msgspec on the same Structs.

    python perf/ipc.py [--quick]
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

from ipc import codec
from ipc.channel import Channel, Sent
from ipc.messages import Emissions, Generate, GenerateHead, Kind
from perf.report import alternate, finish, is_quick, per_call_us, table

PAYLOAD = [b"x" * 5, b"y" * 64, b"z" * 1024]


def send_all(address: str, orders: Connection) -> None:
    """The sending process, bare for both contenders: what differs is the receiver."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.connect(address)
    while (count := orders.recv()) is not None:
        for _ in range(count):
            socket.send_multipart(PAYLOAD)
    context.destroy(0)


def receive_bare(socket: "zmq.Socket[bytes]", count: int) -> float:
    socket.recv_multipart()
    started = time.perf_counter()
    for _ in range(count - 1):
        socket.recv_multipart()
    return (time.perf_counter() - started) / (count - 1) * 1e6


def receive_channel(socket: "zmq.Socket[bytes]", count: int) -> float:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        channel, done = Channel(socket), loop.create_future()
        started, seen = 0.0, 0

        def on_frames(_: list[bytes]) -> None:
            nonlocal started, seen
            seen += 1
            if seen == 1:
                started = time.perf_counter()
            elif seen == count:
                done.set_result((time.perf_counter() - started) / (count - 1) * 1e6)

        channel.attach(loop, on_frames)
        result = await done
        channel.detach()  # the socket is used again by the other contender
        return float(result)

    return uvloop.run(run())


def wire(count: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/s"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.bind(address)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        sender = multiprocessing.get_context("spawn").Process(target=send_all, args=(address, theirs))
        sender.start()

        def bare() -> float:
            ours.send(count)
            return receive_bare(socket, count)

        def channel() -> float:
            ours.send(count)
            return receive_channel(socket, count)

        result = alternate({"channel": channel, "bare": bare}, 3 if is_quick() else 7)
        result["send"] = sending(context, 2_000)
        ours.send(None)
        sender.join()
        context.destroy(0)
    return result


def sending(context: "zmq.Context[zmq.Socket[bytes]]", count: int) -> dict[str, float]:
    """send_nowait over bare send_multipart, as a ratio of medians."""
    sink = context.socket(zmq.PULL)
    sink.bind("inproc://sink")
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 0)
    sink.setsockopt(zmq.RCVHWM, 0)
    push.connect("inproc://sink")
    made = Channel(push)

    def drain() -> None:
        while sink.poll(0):
            sink.recv_multipart()

    def ours() -> float:
        spent = per_call_us(lambda: made.send_nowait(PAYLOAD), count)
        drain()
        return spent

    def bare() -> float:
        spent = per_call_us(lambda: push.send_multipart(PAYLOAD, zmq.NOBLOCK), count)
        drain()
        return spent

    if made.send_nowait(PAYLOAD) is not Sent.YES:
        raise RuntimeError("the benchmark's own socket is full")
    result = alternate({"ours": ours, "bare": bare}, 5)
    return {"median": result["ours"]["median"], "low": result["bare"]["median"], "high": result["ours"]["high"]}


def coding() -> dict[str, dict[str, float]]:
    body = codec.encode(Generate("x" * 4096, max_tokens=200, stop=["a", "b"]))
    head = codec.encode(GenerateHead("17", "smollm2", "interactive", "tenant", 5000))
    bare_body, bare_head = msgspec.msgpack.Decoder(Generate), msgspec.msgpack.Decoder(GenerateHead)
    frames = [codec.ENVELOPES[Kind.GENERATE], head, body]

    def decode() -> None:
        codec.kind_of(frames)
        codec.decode(frames[1], GenerateHead, "head")
        codec.decode(frames[2], Generate)

    def decode_bare() -> None:
        bare_head.decode(head)
        bare_body.decode(body)

    results = alternate(
        {"GENERATE 4 kB": lambda: per_call_us(decode, 20_000), "bare": lambda: per_call_us(decode_bare, 20_000)}, 5
    )
    made = {"GENERATE 4 kB": {"ours": results["GENERATE 4 kB"]["median"], "bare": results["bare"]["median"]}}
    for num_entries in (1, 64, 256):
        columns = list(range(num_entries))
        message = Emissions(
            1, 2, 3, columns, [1] * num_entries, columns, [1] * num_entries, [7] * num_entries, [60] * num_entries
        )
        data = codec.encode(message)
        decoder = msgspec.msgpack.Decoder(Emissions)
        count = 40_000 // num_entries
        results = alternate(
            {
                "ours": lambda data=data, count=count: per_call_us(lambda: codec.decode(data, Emissions), count),
                "bare": lambda data=data, count=count, decoder=decoder: per_call_us(
                    lambda: decoder.decode(data), count
                ),
                "encode": lambda message=message, count=count: per_call_us(lambda: codec.encode(message), count),
            },
            5,
        )
        made[f"EMISSIONS {num_entries}"] = {name: value["median"] for name, value in results.items()}
    return made


def main() -> None:
    result = wire(20_000 if is_quick() else 60_000)
    table(
        ["1 kB between processes", "us/message", "spread"],
        [
            [name, result[name]["median"], f"{result[name]['low']:.3g}-{result[name]['high']:.3g}"]
            for name in ("channel", "bare")
        ],
    )
    ratio = result["channel"]["median"] / result["bare"]["median"]
    send_ratio = result["send"]["median"] / result["send"]["low"]
    print(f"receiving through a Channel costs {ratio:.2f} x bare; sending {send_ratio:.2f} x bare\n")
    coded = coding()
    table(
        ["decode", "us", "bare us", "x bare", "encode us"],
        [
            [name, each["ours"], each["bare"], each["ours"] / each["bare"], each.get("encode", "-")]
            for name, each in coded.items()
        ],
    )
    finish("ipc", {"receive_x_bare": round(ratio, 3), "send_x_bare": round(send_ratio, 3), "codec_us": coded})


if __name__ == "__main__":
    main()
