"""Owns how tests speak HTTP to an engine by the standard library: whole requests, raw bytes, samples of metrics."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import psutil

from tests.system.harness import EngineProcess

DOOR = {"ENGINE_HTTP_GATEWAYS": "2"}


def address(running: EngineProcess) -> tuple[str, int]:
    where = urlparse(running.url)
    return str(where.hostname), int(where.port or 0)


def raw_post(path: str, fields: dict[str, Any], *headers: str) -> bytes:
    """The bytes of a POST."""
    body = json.dumps(fields).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def gateways_of(running: EngineProcess) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(running.pid).children():
        with contextlib.suppress(psutil.Error):  # it ends while we look
            if "engine.gateway.main" in " ".join(each.cmdline()):
                found.append(each)
    return found


def send(
    running: EngineProcess, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """One request to an engine's door."""
    return ask(address(running), method, path, body, headers)


def ask(
    where: tuple[str, int], method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """One request by the standard library."""
    connection = http.client.HTTPConnection(*where, timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def get(running: EngineProcess, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    status, body, told = send(running, "GET", path, None, headers)
    return status, json.loads(body) if told.get("content-type") == "application/json" else body.decode(), told


def post(running: EngineProcess, path: str, body: object, **headers: str) -> tuple[int, Any, dict[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer, told = send(running, "POST", path, data, {"Content-Type": "application/json", **headers})
    return status, json.loads(answer) if told.get("content-type") == "application/json" else answer.decode(), told


def complete(running: EngineProcess, **fields: object) -> tuple[int, Any, dict[str, str]]:
    return post(running, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields})


def chat(running: EngineProcess, **fields: object) -> tuple[int, Any, dict[str, str]]:
    messages = [{"role": "user", "content": "hi"}]
    return post(running, "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 2, **fields})


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which ends with exactly one [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


@contextlib.contextmanager
def raw(running: EngineProcess, data: bytes) -> Iterator[bytes]:
    """What the door answers to bytes; b"" when it just closes."""
    with socket.create_connection(address(running), 10) as connection:
        connection.settimeout(10)
        connection.sendall(data)
        try:
            yield connection.recv(4096)
        except ConnectionResetError:
            yield b""


def metric(running: EngineProcess, name: str, **labels: str) -> float | None:
    """A sample of /metrics."""
    _, text, _ = get(running, "/metrics")
    for line in text.splitlines():
        found = line.partition("{")[0].partition(" ")[0]
        if found == name and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return None


def is_listening(running: EngineProcess) -> bool:
    with contextlib.suppress(OSError):
        return get(running, "/livez")[0] == 200
    return False


def get_or_none(running: EngineProcess, path: str) -> int | None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return get(running, path)[0]
    return None
