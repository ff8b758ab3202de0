"""What a service manager hears of a real engine, on a socket in its place: order, rate, sender, silence."""

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import pytest

from engine.notify import KEPT_MAX, Notifier, from_environment
from ipc.messages import Finished
from tests.system.harness import EngineProcess, engine, sim_toml, until

WATCHDOG_S = 0.4
VARIABLES = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


@dataclass
class Heard:
    """One datagram: when, from whom, and its lines."""

    at: float
    pid: int
    lines: list[str]


class Manager:
    """Reads the socket of a service manager, and who sent what. `heard` only grows."""

    def __init__(self, address: str) -> None:
        self.heard: list[Heard] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.settimeout(0.05)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_over.is_set():
            try:
                data, told, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
            except TimeoutError:
                continue
            pid = next(struct.unpack("3i", value)[0] for _, kind, value in told if kind == socket.SCM_CREDENTIALS)
            self.heard.append(Heard(time.monotonic(), pid, data.decode().split("\n")))

    def lines(self, start: str = "", since: int = 0) -> list[str]:
        return [line for each in self.heard[since:] for line in each.lines if line.startswith(start)]

    def pings(self, since: int) -> list[float]:
        return [each.at for each in self.heard[since:] if "WATCHDOG=1" in each.lines]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()


@contextmanager
def manager(address: str) -> Iterator[Manager]:
    made = Manager(address)
    try:
        yield made
    finally:
        made.close()


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def hears_pings(heard: Manager, count: int = 3) -> list[float]:
    since = len(heard.heard)
    return until(lambda: (found := heard.pings(since))[count - 1 :] and found, what=f"{count} signs of life")


def test_a_life_as_its_manager_hears_it(tmp_path: Path):
    """OmniRoute#10661, systemd#25961, systemd#5868: frozen and not seen, pings of a child, killed while it loaded."""
    address = str(tmp_path / "notify")
    toml = sim_toml(replicas=2, sim="load_s = 1.4", restart="hang_floor_s = 60")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)), "ENGINE_HTTP_GATEWAYS": "1"}
    with manager(address) as heard, engine(toml, **environment) as running:
        check_start(heard, running)
        check_no_child_has_the_variables(running)
        check_rate(heard)
        check_reload(heard, running)
        check_a_hung_worker_does_not_silence_it(heard, running)
        check_a_stopped_engine_is_silent(heard, running)
        check_end(heard, running)
        assert {each.pid for each in heard.heard} == {running.pid}


def check_start(heard: Manager, running: EngineProcess) -> None:
    until(lambda: len(heard.lines("EXTEND")) >= 2, what="the start is extended")
    assert not heard.lines("READY")
    assert heard.lines("STATUS") == ["STATUS=loading: 0 of 2 replicas ready"]
    assert all(replica.state == "starting" for replica in running.replicas())
    until(lambda: heard.lines("READY"), what="ready")
    assert any(replica.state == "ready" for replica in running.replicas())
    until(lambda: heard.lines("STATUS")[-1] == "STATUS=ready: 2 of 2 replicas ready", what="both ready")
    order = [line.partition("=")[0] for line in heard.lines() if line.startswith(("EXTEND", "READY"))]
    assert order == ["EXTEND_TIMEOUT_USEC"] * (len(order) - 1) + ["READY"]


def check_no_child_has_the_variables(running: EngineProcess) -> None:
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) == 3
    assert not any(VARIABLES & set(child.environ()) for child in children)


def check_rate(heard: Manager) -> None:
    pings = hears_pings(heard, 6)
    gaps = [later - earlier for earlier, later in pairwise(pings)]
    assert WATCHDOG_S / 2 - 0.1 < median(gaps) < WATCHDOG_S / 2 + 0.15


def check_reload(heard: Manager, running: EngineProcess) -> None:
    text = running.toml
    for change, told in ((("2048", "1024"), ""), (('"sim"', '"other"', 1), "; the last reload was refused")):
        since = len(heard.heard)
        before = time.monotonic()
        running.config_path.write_text(text.replace(*change))
        running.signal(signal.SIGHUP)
        until(lambda since=since: heard.lines("READY", since), what="the reload has ended")
        told_now = [each for each in heard.heard[since:] if not each.lines[0].startswith("WATCHDOG")]
        assert [each.lines[0] for each in told_now] == ["RELOADING=1", "READY=1"]
        usec = int(told_now[0].lines[1].removeprefix("MONOTONIC_USEC="))
        assert before * 1e6 - 1 <= usec <= told_now[0].at * 1e6
        assert told_now[1].lines[1] == f"STATUS=ready: 2 of 2 replicas ready{told}"
        text = running.config_path.read_text() if not told else text


def check_a_hung_worker_does_not_silence_it(heard: Manager, running: EngineProcess) -> None:
    pid = running.worker_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: is_stopped(pid), what="a stopped worker")
        hears_pings(heard)
    finally:
        os.kill(pid, signal.SIGCONT)


def check_a_stopped_engine_is_silent(heard: Manager, running: EngineProcess) -> None:
    running.signal(signal.SIGSTOP)
    until(lambda: is_stopped(running.pid), what="a stopped engine")
    threading.Event().wait(0.1)  # what it sent before is read
    since = len(heard.heard)
    threading.Event().wait(2 * WATCHDOG_S)  # the time that is looked at, not a wait for something
    assert heard.heard[since:] == []
    running.signal(signal.SIGCONT)
    hears_pings(heard, 2)


def check_end(heard: Manager, running: EngineProcess) -> None:
    with running.client() as client:
        stream = client.stream("sim", "x", max_tokens=200, ignore_eos=True)
        next(stream)
        since = len(heard.heard)
        running.signal(signal.SIGTERM)
        until(lambda: heard.lines("EXTEND", since), what="the drain is extended")
        assert isinstance(list(stream)[-1], Finished)
        assert running.wait_exit() == 0
    told = [line for line in heard.lines("", since) if not line.startswith("WATCHDOG")]
    assert told[0] == "STOPPING=1"
    assert told.count("STOPPING=1") == 1
    assert "READY=1" not in told


def can(act: Callable[..., object], *arguments: object) -> bool:
    """Whether it could be done without waiting."""
    try:
        act(*arguments)
    except BlockingIOError:
        return False
    return True


def test_a_manager_that_does_not_read_costs_nothing(tmp_path: Path):
    """A blocking send to a full socket would hang the engine with its manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.bind(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
            filler.setblocking(False)
            while can(filler.sendto, b"x", str(tmp_path / "notify")):
                pass
        with engine(sim_toml(), NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="100000") as running:
            running.wait_ready()
            with running.client() as client:
                assert client.generate("sim", "x", max_tokens=3, ignore_eos=True).reason == "length"
            while full.recv(100) == b"x":  # it reads at last, and is told what it missed
                pass
            full.settimeout(10)
            until(lambda: b"READY=1" in full.recv(4096), what="ready, late")
            running.signal(signal.SIGTERM)
            assert running.wait_exit() == 0


# The socket.


def test_what_is_to_arrive_is_kept_in_order_and_bounded(tmp_path: Path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.bind(address)
        full.setblocking(False)
        notifier = Notifier(address)
        for number in range(10_000):
            notifier.tell([f"STATUS={number}"])
            notifier.pulse(["WATCHDOG=1"])
        heard: list[bytes] = []
        while can(lambda: heard.append(full.recv(100))):
            notifier.flush()
        notifier.pulse(["WATCHDOG=1"])
        assert full.recv(100) == b"WATCHDOG=1"
        notifier.close()
    told = [int(line.removeprefix(b"STATUS=")) for line in heard if line.startswith(b"STATUS=")]
    assert told == sorted(told)
    assert told[-KEPT_MAX:] == list(range(10_000 - KEPT_MAX, 10_000))


def test_abstract_addresses():
    address = f"@engine-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + address[1:])
        listening.settimeout(5)
        notifier = Notifier(address)
        notifier.tell(["READY=1", "STATUS=x"])
        assert listening.recv(100) == b"READY=1\nSTATUS=x"
        notifier.close()


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "relative", "vsock:2:1", "/" + "x" * 200])
def test_a_socket_that_is_not_there_is_no_trouble(address: str):
    notifier = Notifier(address, 10.0)
    notifier.tell(["READY=1"])
    notifier.pulse(["WATCHDOG=1"])
    notifier.flush()
    notifier.close()
    notifier.tell(["READY=1"])


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("10000000", None, 10.0),
        ("10000000", str(os.getpid()), 10.0),
        ("10000000", "1", 0.0),
        ("x", None, 0.0),
        ("-5", None, 0.0),
        (None, None, 0.0),
    ],
)
def test_the_environment_says_who_watches_and_is_emptied(usec: str | None, pid: str | None, expected: float):
    told = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid, "PATH": "/bin"}
    environ = {name: value for name, value in told.items() if value is not None}
    notifier = from_environment(environ)
    assert (notifier.is_on, notifier.watchdog_s) == (True, expected)
    assert environ == {"PATH": "/bin"}
    notifier.close()
    assert not from_environment({}).is_on
