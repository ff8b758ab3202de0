"""Owns how system tests run a real engine: its own run directory, its own configuration, conditions instead of sleeps.

Knows the command line and the sockets, nothing inside. Used by the tests of this folder and by `perf/`.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.operate import Admin
from ipc.client import Client, client_address
from ipc.errors import EngineError
from ipc.messages import ReplicaReport, StatusReport

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0
# The suite can run its engines under `python -O`, where assertions are compiled away.
OPTIMIZE = {"PYTHONOPTIMIZE": "1"} if os.environ.get("ENGINE_TEST_OPTIMIZE") else {}
# Engines of tests have no HTTP door unless they ask for one, and then on a free port.
HTTP = {"ENGINE_HTTP_GATEWAYS": "0", "ENGINE_HTTP_PORT": "0"}

SIM = """
[[deployment]]
route = "sim"
runner = "sim"
replicas = {replicas}
[deployment.llm]
max_model_len = 4096
block_size = 16
num_blocks = {num_blocks}
max_num_seqs = {seats}
[deployment.sim]
step_ms = {step_ms}
overlap = true
{sim}
[deployment.queue]
{queue}
[deployment.restart]
{restart}
"""


def sim_toml(replicas: int = 1, seats: int = 16, num_blocks: int = 2048, step_ms: float = 2.0, **tables: str) -> str:
    """A configuration of one sim route; `sim`, `queue`, `restart` and `front` take further TOML lines."""
    parts = {name: tables.get(name, "") for name in ("sim", "queue", "restart")}
    front = f"[front]\n{tables['front']}\n" if "front" in tables else ""
    engine = f"[engine]\n{tables['engine']}\n" if "engine" in tables else ""
    return engine + front + SIM.format(replicas=replicas, seats=seats, num_blocks=num_blocks, step_ms=step_ms, **parts)


def llm_toml(
    route: str, model: object, max_model_len: int = 200, num_blocks: int = 128, llm: str = "", more: str = ""
) -> str:
    """A deployment of a small real model; `llm` and `more` take further TOML lines of its tables."""
    return f"""
[[deployment]]
route = "{route}"
model = "{model}"
{more}
[deployment.llm]
max_model_len = {max_model_len}
max_num_seqs = 8
num_blocks = {num_blocks}
{llm}
[deployment.restart]
hang_floor_s = 60
backoff_s = 0.0
intensity = 100
"""


def until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S, what: str = "") -> Any:
    """Poll until the condition is truthy and return it; fails with `what` when the deadline passes."""
    give_up_at = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}")
        pause.wait(0.02)

    return threading.Event()


@dataclass
class EngineProcess:
    """One engine started from the command line."""

    directory: Path
    toml: str
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> str:
        return str(self.directory / "run")

    @property
    def config_path(self) -> Path:
        return self.directory / "engine.toml"

    def start(self) -> "EngineProcess":
        if self.process is not None:
            self.process.wait(DEADLINE_S)  # the one before: killed by the test
        self.config_path.write_text(self.toml)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.cli", "serve", str(self.config_path)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "ENGINE_RUN_DIR": self.run_dir, **HTTP, **OPTIMIZE, **self.environment},
            )
        return self

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError("not started")
        return self.process.pid

    @property
    def url(self) -> str:
        """Where the HTTP door listens; for engines with HTTP["ENGINE_HTTP_GATEWAYS"] set to 1."""
        found = until(lambda: re.search(r"url=(http://\S+)", self.log()), what="the address of the HTTP door")
        return str(found[1])

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def client(self, **options: Any) -> Client:
        return Client(client_address(self.run_dir), **options)

    def status(self) -> StatusReport | None:
        """None while nobody answers."""
        try:
            with Admin(self.run_dir, answer_s=1.0) as admin:
                return admin.status()
        except EngineError:
            return None

    def replicas(self) -> list[ReplicaReport]:
        report = self.status()
        return report.replicas if report else []

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> "EngineProcess":
        def is_ready() -> bool:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"exit {self.process.returncode}:\n{self.log()}")
            report = self.status()
            return report is not None and report.state == "ready"

        until(is_ready, deadline_s, "READY")
        return self

    def worker_pids(self) -> list[int]:
        return [replica.pid for replica in self.replicas() if replica.pid]

    def processes(self) -> list[int]:
        """The front and everything below it."""
        try:
            front = psutil.Process(self.pid)
            return [front.pid, *(child.pid for child in front.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_exit(self, deadline_s: float = DEADLINE_S) -> int:
        if self.process is None:
            raise RuntimeError("not started")
        return self.process.wait(deadline_s)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5.0)


@contextmanager
def engine(toml: str, **environment: str) -> Iterator[EngineProcess]:
    """A running engine in a directory of its own; its log is shown when the body fails."""
    with tempfile.TemporaryDirectory(prefix="e-") as directory:
        running = EngineProcess(Path(directory), toml, environment)
        try:
            yield running.start()
        except BaseException:
            sys.stderr.write(running.log()[-4000:])
            raise
        finally:
            running.stop()


def is_gone(pid: int) -> bool:
    """True when no such process runs any more; a zombie has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
