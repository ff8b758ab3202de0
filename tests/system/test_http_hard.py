"""The HTTP door under what is wrong, large, endless or sudden: no fault, no hang, no growth, and health meanwhile."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.system.harness import EngineProcess, engine, sim_toml, until
from tests.system.http_calls import (
    DOOR,
    address,
    complete,
    gateways_of,
    get,
    is_listening,
    metric,
    post,
    raw_post,
    send,
)

GROWTH_MAX = 48 * 2**20  # bytes of all gateways
HEADS = [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.fixture(scope="module")
def running() -> Iterator[EngineProcess]:
    toml = sim_toml(step_ms=5.0, restart="backoff_s = 0.0\nintensity = 100") + "[http]\nread_s = 0.2\nwrite_s = 2.0\n"
    with engine(toml, **DOOR) as made:
        made.wait_ready()
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


def memory(running: EngineProcess) -> int:
    return sum(each.memory_info().rss for each in gateways_of(running))


def mutated(dice: random.Random) -> bytes:
    """A good request or an odd one, with some bytes changed, cut or doubled."""
    fields = {"model": "sim", "prompt": "x", "max_tokens": 1, "stream": dice.random() < 0.3}
    path = dice.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/models"])
    data = bytearray(raw_post(path, fields, "Connection: close") if dice.random() < 0.8 else dice.choice(HEADS))
    for _ in range(dice.randint(0, 6)):
        at = dice.randrange(len(data))
        match dice.randrange(4):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                del data[at : at + dice.randint(1, 40)]
            case 2:
                data[at:at] = data[max(0, at - 30) : at]
            case _:
                data[at:at] = bytes(dice.randrange(256) for _ in range(dice.randint(1, 8)))
        if not data:
            data = bytearray(b"\r\n")
    return bytes(data)


async def storm(where: tuple[str, int], dice: random.Random, count: int, at_once: int) -> dict[bytes, int]:
    """Send so many; how many of each status came back. Raises TimeoutError for one that hangs."""
    seen: dict[bytes, int] = {}

    async def some() -> None:
        for _ in range(count // at_once):
            data = mutated(dice)
            reader, writer = await asyncio.open_connection(*where)
            answer = b""
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                async with asyncio.timeout(30):
                    answer = await reader.read(64)
            writer.close()
            found = re.match(rb"HTTP/\d\.\d (\d{3}) ", answer)  # in the version that was asked in
            assert found or not answer, (data, answer)
            status = found[1] if found else b"closed"
            seen[status] = seen.get(status, 0) + 1
            assert not (status.startswith(b"5") and status != b"503"), (data, answer)

    await asyncio.gather(*(some() for _ in range(at_once)))
    return seen


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_malformed_requests_never_make_a_fault(running: EngineProcess, count: int):
    asyncio.run(storm(address(running), random.Random(5), 500, 25))  # what is allocated once
    before = memory(running)
    seen = asyncio.run(storm(address(running), random.Random(7), count, 25))
    print(sorted(seen.items()))
    assert {b"200", b"400", b"404"} <= set(seen)
    assert memory(running) - before < GROWTH_MAX
    until(lambda: all(each.num_in_flight == 0 for each in running.replicas()), 20.0, "nothing runs")
    assert complete(running, model="sim")[0] == 200
    report = running.status()
    assert report is not None
    assert report.counters.internal_errors == 0


def test_a_body_without_an_end_is_cut_off(running: EngineProcess):
    """Chunks for ever, and a length that is promised and not kept."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    before = memory(running)
    with socket.create_connection(address(running), 10) as connection:
        connection.settimeout(10)
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(64).startswith(b"HTTP/1.1 413")
    with socket.create_connection(address(running), 10) as connection:
        connection.settimeout(10)
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{")
        assert connection.recv(64).startswith(b"HTTP/1.1 408")
    for length in (50_000_000, 10**18):
        with socket.create_connection(address(running), 10) as connection:
            connection.settimeout(10)
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % length)
            assert connection.recv(64).startswith(b"HTTP/1.1 413")  # before anything of it was read
    assert memory(running) - before < GROWTH_MAX


def test_a_head_without_an_end_is_cut_off_alone(running: EngineProcess):
    """Slow loris: many connections that never finish their heads do not keep anybody out."""
    connections = [socket.create_connection(address(running), 10) for _ in range(200)]
    try:
        for connection in connections:
            connection.settimeout(10)
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        started = time.monotonic()
        assert get(running, "/livez")[0] == 200
        assert complete(running, model="sim")[0] == 200
        assert time.monotonic() - started < 2
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(64) == b""
    finally:
        for connection in connections:
            connection.close()


def test_health_answers_while_large_bodies_and_many_streams_come(running: EngineProcess):
    """vllm#38157, vllm-mlx#261: tokenizing in the event loop held health up."""
    stop = threading.Event()
    large = json.dumps({"model": "sim", "prompt": "x" * 900_000, "max_tokens": 1}).encode()
    much = b" " * 20_000_000

    def bodies() -> None:
        while not stop.is_set():
            assert post(running, "/v1/completions", large)[0] == 400
            with contextlib.suppress(ConnectionError):
                assert send(running, "POST", "/v1/completions", much, {"Content-Type": "application/json"})[0] == 413

    def streams() -> None:
        body = raw_post("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 500, "stream": True})
        connections = [socket.create_connection(address(running), 10) for _ in range(50)]
        for connection in connections:
            connection.sendall(body)
        stop.wait(20)
        for connection in connections:
            connection.close()

    threads = [threading.Thread(target=bodies), threading.Thread(target=streams)]
    for thread in threads:
        thread.start()
    took = []
    try:
        for _ in range(150):
            started = time.monotonic()
            assert get(running, "/health")[0] == 200
            took.append(time.monotonic() - started)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    took.sort()
    assert took[int(0.99 * len(took))] < 0.5


def test_not_ready_before_the_first_warm_up():
    """vllm#36960: ready before the model could answer."""
    with engine(sim_toml(sim="load_s = 2.0"), **DOOR) as running:
        until(lambda: is_listening(running), 10.0, "a door")
        assert [get(running, path)[0] for path in ("/livez", "/readyz", "/startupz", "/health")] == [200, 503, 503, 503]
        early = complete(running, model="sim", deadline_ms=100)
        assert early[0] in {503, 504}
        waiting = complete(running, model="sim")  # queued until there is somebody, by rule
        assert waiting[0] == 200
        until(lambda: get(running, "/readyz")[0] == get(running, "/startupz")[0] == 200, 2.0, "ready")


def test_what_a_cancelled_stream_used_is_counted_and_logged(running: EngineProcess):
    """openai-openapi#539: a cancelled stream left no token count anywhere; vllm#31503: no count at all."""
    names = ("engine_requests_total", {"route": "sim", "outcome": "cancelled"}), ("vllm:generation_tokens_total", {})
    before = [metric(running, name, **labels) or 0 for name, labels in names]
    body = {"model": "sim", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with socket.create_connection(address(running), 10) as connection:
        connection.sendall(raw_post("/v1/completions", body, "x-request-id: gone-1"))
        seen = b""
        while seen.count(b"data: ") < 5:
            seen += connection.recv(4096)
    until(lambda: (metric(running, names[0][0], **names[0][1]) or 0) == before[0] + 1, 5.0, "it is counted")
    assert (metric(running, names[1][0]) or 0) >= before[1] + 5
    (line,) = until(lambda: [line for line in running.log().splitlines() if "request=gone-1" in line])
    assert " status=499 " in line
    assert int(line.partition("tokens=")[2].split()[0]) >= 5


def test_nobody_fetches_what_a_message_points_at(running: EngineProcess):
    """ragflow#15359, reader#1252: image parts were fetched by the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}]
        for part in content:
            messages = [{"role": "user", "content": [part]}]
            assert post(running, "/v1/chat/completions", {"model": "sim", "messages": messages})[0] == 400
            assert post(running, "/v1/responses", {"model": "sim", "input": messages})[0] == 400
        with pytest.raises(TimeoutError):
            listener.accept()


def wait_for_others(running: EngineProcess, victims: set[int]) -> None:
    """In the places of these processes: a death that has not been noticed yet looks like life."""
    until(lambda: len({each.pid for each in gateways_of(running)} - victims) == 2, 10.0, "all gateways")
    until(lambda: running.replicas()[0].pid not in victims, 10.0, "another worker")
    running.wait_ready()


def test_counters_never_fall_whoever_dies(running: EngineProcess):
    """spire-codex#297, TensorRT-LLM#19418: a scrape showed some process, and a dead one's gauges stayed."""
    last: dict[str, float] = {}

    def scrape() -> None:
        _, text, _ = get(running, "/metrics")
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            # Those of a worker's own account begin again with its successor, and are gone in between.
            if name.endswith(("_total", "_count")) and "preemptions" not in name and "non_finite" not in name:
                key, _, value = line.rpartition(" ")
                assert float(value) >= last.get(key, 0), line
                last[key] = float(value)

    for round_number in range(3):
        for _ in range(6):
            assert complete(running, model="sim")[0] == 200
            scrape()
        victims = [running.replicas()[0].pid] if round_number % 2 else [each.pid for each in gateways_of(running)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_for_others(running, set(victims))
    scrape()


@pytest.mark.parametrize("name", ["session", "prompt_cache_key"])
def test_a_session_finds_its_cache_again(name: str):
    """Of three replicas one has the conversation's blocks; what else comes in between does not draw it away."""
    with engine(sim_toml(replicas=3, step_ms=5.0), **DOOR) as running:
        running.wait_ready()
        until(lambda: get(running, "/readyz")[0] == 200, 10.0, "a ready door")
        cached = []
        for number in range(6):
            prompt = "a conversation of ours " * 10
            _, told, _ = complete(running, model="sim", prompt=prompt, **{name: "s" * 200})
            cached.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
            other = {"model": "sim", "prompt": f"{number}", "max_tokens": 3000, "ignore_eos": True}
            with socket.create_connection(address(running), 10) as connection:  # keeps some replica busy for a while
                connection.sendall(raw_post("/v1/completions", other))
                until(lambda: any(each.num_in_flight for each in running.replicas()), 5.0, "it runs")
                complete(running, model="sim", prompt="z", max_tokens=1)
        assert cached == [0] + [len(prompt) // 16 * 16] * 5
