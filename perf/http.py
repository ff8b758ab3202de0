"""What the HTTP door costs: server-sent events and whole answers of one gateway, beside a bare aiohttp handler.

Ceiling: an aiohttp handler in a process of its own that reads the body and writes constant bytes of the same size, at
the same pace, under the same client. Compared is the CPU time of the two processes, events and requests per second of
it: on a machine with few cores the wall clock would measure client, front and worker as well. The fake model gives each
of 64 streams a token every 4 ms, and an answer of one token after 4 ms; so does the twin. Added latency is that of a
request of one token over HTTP less the same by the native client, one at a time.

    python perf/http.py [--quick]
"""

import asyncio
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlparse

sys.path.pop(0)  # its own folder, where this file would hide the module http
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import uvloop
from aiohttp import web

from ipc.client import AsyncClient, client_address
from perf.report import finish, is_quick, quantiles, spread, table
from tests.system.harness import EngineProcess, engine, sim_toml, until
from tests.system.http_calls import gateways_of, get, raw_post

STEP_MS = 4.0
STREAMS = 64
TOKENS = 250
UNARY = 2000
UNARY_AT_ONCE = 32
ONE_BY_ONE = 300
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1796229966,'
    b'"model":"sim","choices":[{"index":0,"text":"ab","logprobs":null,"finish_reason":null}]}\n\n'
)
WHOLE = json.dumps(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1796229966,
        "model": "sim",
        "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
STREAM_BODY = {"model": "sim", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
UNARY_BODY = {"model": "sim", "prompt": "hello", "max_tokens": 1, "ignore_eos": True}


def bare(answers: Connection) -> None:
    """The twin: the same bytes, and nothing behind them."""

    waiting: list[asyncio.Future[None]] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        loop = asyncio.get_running_loop()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(TOKENS):
            waiter = loop.create_future()
            waiting.append(waiter)
            await waiter
            await response.write(CHUNK)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def whole(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(STEP_MS / 1e3)
        return web.Response(body=WHOLE, headers={"Content-Type": "application/json"})

    async def pace() -> None:
        while True:
            await asyncio.sleep(STEP_MS / 1e3)
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
            waiting.clear()

    async def serve() -> None:
        pacing = asyncio.create_task(pace())
        app = web.Application()
        app.router.add_post("/stream", stream)
        app.router.add_post("/whole", whole)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        answers.send(runner.addresses[0][1])
        await pacing

    uvloop.run(serve())


async def _one(address: tuple[str, int], data: bytes, count: int, is_stream: bool) -> int:
    """`count` requests one after the other on one connection; the events or answers read."""
    reader, writer = await asyncio.open_connection(*address)
    found = 0
    for _ in range(count):
        writer.write(data)
        if is_stream:
            tail = b""
            while b"\r\n0\r\n\r\n" not in tail[-16:]:
                part = await reader.read(65_536)
                assert part, "the connection was closed"
                tail = tail[-16:] + part
                found += part.count(b"data: ")
        else:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            found += 1
    writer.close()
    return found


def client(orders: Connection) -> None:
    """Drives one run after the other, away from what is measured."""

    async def run(address: tuple[str, int], data: bytes, at_once: int, each: int, is_stream: bool) -> int:
        return sum(await asyncio.gather(*(_one(address, data, each, is_stream) for _ in range(at_once))))

    while (order := orders.recv()) is not None:
        orders.send(uvloop.run(run(*order)))


def cpu_s(process: psutil.Process) -> float:
    told = process.cpu_times()
    return float(told.user + told.system)


def measure(process: psutil.Process, orders: Connection, order: tuple) -> tuple[float, float]:
    """Events or requests per second of the process's CPU, and per second of the clock."""
    before, started = cpu_s(process), time.perf_counter()
    orders.send(order)
    found = orders.recv()
    return found / (cpu_s(process) - before), found / (time.perf_counter() - started)


async def added(running: EngineProcess, address: tuple[str, int], count: int) -> tuple[list[float], list[float]]:
    """Seconds of requests of one token, by HTTP and by the native client, in turn."""
    over_http, native = [], []
    data = raw_post("/v1/completions", UNARY_BODY)
    reader, writer = await asyncio.open_connection(*address)
    async with AsyncClient(client_address(running.run_dir)) as client:
        for _ in range(count):
            started = time.perf_counter()
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            over_http.append(time.perf_counter() - started)
            started = time.perf_counter()
            await client.generate("sim", "hello", max_tokens=1, ignore_eos=True)
            native.append(time.perf_counter() - started)
    writer.close()
    return over_http, native


def main() -> None:
    num_runs = 1 if is_quick() else 5
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    twin = context.Process(target=bare, args=(theirs,), daemon=True)
    twin.start()
    twin_address = ("127.0.0.1", ours.recv())
    orders, at_client = context.Pipe()
    driver = context.Process(target=client, args=(at_client,), daemon=True)
    driver.start()
    toml = sim_toml(seats=STREAMS, step_ms=STEP_MS, num_blocks=4096) + "[http]\nport = 0\ngateways = 1\n"
    found: dict[str, dict[str, list[float]]] = {"events": {}, "requests": {}}
    with engine(toml, ENGINE_HTTP_GATEWAYS="1") as running:
        running.wait_ready()
        until(lambda: get(running, "/readyz")[0] == 200, 10.0, "a ready door")
        where = urlparse(running.url)
        address = (str(where.hostname), int(where.port or 0))
        (gateway,) = gateways_of(running)
        twin_process = psutil.Process(twin.pid)
        each = UNARY // UNARY_AT_ONCE
        for _ in range(num_runs):
            for name, kind in (("events", True), ("requests", False)):
                at_once, count = (STREAMS, 2) if kind else (UNARY_AT_ONCE, each)
                body = STREAM_BODY if kind else UNARY_BODY
                path = "/stream" if kind else "/whole"
                for who, process, to, data in (
                    ("gateway", gateway, address, raw_post("/v1/completions", body)),
                    ("bare", twin_process, twin_address, raw_post(path, body)),
                ):
                    per_cpu, per_wall = measure(process, orders, (to, data, at_once, count, kind))
                    found[name].setdefault(who, []).append(per_cpu)
                    found[name].setdefault(f"{who} by the clock", []).append(per_wall)
        over_http, native = asyncio.run(added(running, address, 50 if is_quick() else ONE_BY_ONE))
    orders.send(None)
    twin.kill()
    ratios = {
        name: spread([mine / other for mine, other in zip(told["gateway"], told["bare"], strict=True)])
        for name, told in found.items()
    }
    told_ms = {q: (quantiles(over_http)[q] - quantiles(native)[q]) * 1e3 for q in ("p50", "p99")}
    rows = [
        [name, *(spread(found[name][who])["median"] for who in ("gateway", "bare")), ratios[name]["median"]]
        for name in found
    ]
    table(["per CPU second", "gateway", "bare", "ratio"], rows)
    print(f"added to a request of one token: p50 {told_ms['p50']:.2f} ms, p99 {told_ms['p99']:.2f} ms")
    medians = {name: {who: spread(values) for who, values in each.items()} for name, each in found.items()}
    finish("http", {"runs": num_runs, "per_s": medians, "ratio": ratios, "added_ms": told_ms})


if __name__ == "__main__":
    main()
