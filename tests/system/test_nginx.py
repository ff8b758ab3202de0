"""The real nginx with our configuration in front of a real engine: one by one, gone clients, limits, names."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import pytest

from engine.config import Http
from tests.system.harness import ROOT, EngineProcess, engine, sim_toml, until
from tests.system.http_calls import address, ask, gateways_of, get, metric, raw_post

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
OURS = ROOT / "configs/deploy/nginx.conf"
STEP_S = 0.05
NUM_TOKENS = 20
AROUND = """
daemon off;
worker_processes 1;
pid {directory}/pid;
error_log {directory}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log {directory}/access.log;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/engine.conf;
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (on Debian: apt install nginx-light)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def nginx(directory: Path, behind: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """Our file as it is but for the ports, in front of `behind`; where it listens."""
    port = free_port()
    ours = OURS.read_text()
    for old, new in (
        ("server 127.0.0.1:8000", f"server {behind[0]}:{behind[1]}"),
        ("    listen 80;\n", f"    listen 127.0.0.1:{port};\n"),
        ("    listen [::]:80;\n", ""),
    ):
        assert ours.count(old) == 1
        ours = ours.replace(old, new)
    (directory / "engine.conf").write_text(ours)
    whole = directory / "nginx.conf"
    whole.write_text(AROUND.format(directory=directory))
    assert NGINX is not None
    command = [NGINX, "-c", str(whole), "-e", str(directory / "error.log")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False, timeout=20)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr
    process = subprocess.Popen(command)
    try:
        until(lambda: is_open(port), what="nginx listens")
        yield "127.0.0.1", port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def running() -> Iterator[EngineProcess]:
    toml = sim_toml(seats=1, step_ms=STEP_S * 1e3) + "[http]\nkeepalive_s = 0.2\n"
    with engine(toml, ENGINE_HTTP_GATEWAYS="2") as made:
        made.wait_ready()
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


@pytest.fixture(scope="module")
def front(running: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    directory = tmp_path_factory.mktemp("nginx")
    with nginx(directory, address(running)) as where:
        yield where


def completion(**fields: object) -> dict[str, object]:
    return {"model": "sim", "prompt": "x", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **fields}


@contextmanager
def stream(where: tuple[str, int], **fields: object) -> Iterator[socket.socket]:
    with socket.create_connection(where, 20) as connection:
        connection.sendall(raw_post("/v1/completions", completion(**fields)))
        yield connection


def arrivals(connection: socket.socket) -> list[float]:
    """When bytes with an event came, until the stream's end."""
    data, at = b"", []
    while not data.endswith(b"\r\n0\r\n\r\n"):
        got = connection.recv(65_536)
        assert got, data
        data += got
        if b"data: " in got:
            at.append(time.monotonic())
    assert b"[DONE]" in data
    return at


def test_tokens_come_one_by_one(front: tuple[str, int]):
    """A proxy that buffers makes one lump of a stream."""
    with stream(front) as connection:
        at = arrivals(connection)
    assert len(at) > NUM_TOKENS / 2  # a busy machine may join two
    assert STEP_S * 0.8 < median(later - earlier for earlier, later in pairwise(at)) < STEP_S * 2.2
    assert at[-1] - at[0] > STEP_S * (NUM_TOKENS - 1) * 0.8


def test_a_client_that_goes_away_ends_its_request(running: EngineProcess, front: tuple[str, int]):
    with stream(front, max_tokens=3000) as connection:
        while b"data: " not in connection.recv(65_536):
            pass
        assert metric(running, "vllm:num_requests_running") == 1
    until(lambda: metric(running, "vllm:num_requests_running") == 0, 5.0, "nothing runs")
    until(lambda: [each.num_running for each in running.replicas()] == [0], 5.0, "its worker has dropped it")


def test_a_client_that_goes_away_before_an_answer_ends_its_request(running: EngineProcess, front: tuple[str, int]):
    with stream(front, max_tokens=3000, stream=False):
        until(lambda: metric(running, "vllm:num_requests_running") == 1, 5.0, "it runs")
    until(lambda: metric(running, "vllm:num_requests_running") == 0, 5.0, "nothing runs")


def test_comments_of_a_waiting_stream_pass(front: tuple[str, int]):
    with stream(front, max_tokens=25) as first:
        while b"data: " not in first.recv(65_536):
            pass
        with stream(front, max_tokens=2) as second:  # there is one seat
            data = b""
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += second.recv(65_536)
    assert data.count(b": waiting\n\n") >= 3
    assert b"[DONE]" in data


def test_a_body_that_is_too_large_is_refused_in_the_shape_of_errors(front: tuple[str, int]):
    limit = Http().body_bytes_max
    headers = {"Content-Type": "application/json"}
    status, body, told = ask(front, "POST", "/v1/completions", b" " * (limit + 1), headers)
    assert (status, told["content-type"], told["x-should-retry"]) == (413, "application/json", "false")
    assert json.loads(body)["error"]["code"] == "too_large"
    fields = json.dumps(completion(max_tokens=1, stream=False)).encode()
    status, body, _ = ask(front, "POST", "/v1/completions", fields.ljust(limit), headers)
    assert status == 200, body


def test_a_request_keeps_its_id_or_gets_one(front: tuple[str, int]):
    _, _, told = ask(front, "GET", "/v1/models", headers={"X-Request-Id": "mine-1"})
    assert told["x-request-id"] == "mine-1"
    _, _, told = ask(front, "GET", "/v1/models")
    assert len(told["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/metrics", "/metrics?x=1", "//metrics", "/x/../metrics", "/%6detrics", "/./metrics"])
def test_figures_are_not_public(front: tuple[str, int], path: str):
    status, body, _ = ask(front, "GET", path)
    assert status == 404
    assert b"engine_" not in body
    assert ask(front, "GET", "/readyz")[0] == 200


def test_connections_to_the_engine_are_kept(running: EngineProcess, front: tuple[str, int]):
    def kept() -> set[int]:
        """The far ports of the engine's open connections: one that is used again stays the same."""
        open_ones = [each for process in gateways_of(running) for each in process.net_connections("tcp4")]
        return {each.raddr.port for each in open_ones if each.status == psutil.CONN_ESTABLISHED}

    ask(front, "GET", "/livez")
    before = kept()
    for _ in range(10):
        assert ask(front, "GET", "/livez")[0] == 200
    assert before
    assert kept() <= before


def test_an_engine_that_is_not_there_is_a_503_in_the_shape_of_errors(tmp_path: Path):
    with nginx(tmp_path, ("127.0.0.1", free_port())) as where:
        status, body, told = ask(where, "POST", "/v1/completions", b"{}", {"Content-Type": "application/json"})
    assert (status, told["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "unavailable")


def test_the_limits_are_those_of_the_engine():
    text = OURS.read_text()
    assert Http().body_bytes_max == 1 << 20
    assert "client_max_body_size 1m;" in text
    assert f"send_timeout {Http().write_s:.0f}s;" in text
