"""ZeroMQ from other machines: who is let in, as whom, and who is never heard."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from engine.keys import new_curve_pair
from ipc import codec
from ipc.client import Client, Curve
from ipc.errors import Code, EngineError
from ipc.messages import Hello, Kind
from tests.system.harness import ROOT, EngineProcess, engine, sim_toml, until


@dataclass
class Doors:
    running: EngineProcess
    address: str
    curves: dict[str, Curve]

    def client(self, who: str) -> Client:
        return Client(self.address, curve=self.curves[who], hello_s=3.0)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    directory = tmp_path_factory.mktemp("keys")
    secret, public = new_curve_pair()
    (directory / "secret").write_text(secret + "\n")
    (directory / "secret").chmod(0o600)
    pairs = {name: new_curve_pair() for name in ("a", "b", "stranger")}
    entries = [
        f'[[key]]\ncurve = "{pairs["a"][1]}"\ntenant = "a"\nopen_max = 2\n',
        f'[[key]]\ncurve = "{pairs["b"][1]}"\ntenant = "b"\nceiling = "batch"\n',
    ]
    (directory / "keys.toml").write_text("".join(entries))
    front = f'tcp = "127.0.0.1:0"\ncurve_secret_file = "{directory}/secret"\ncurve_keys_file = "{directory}/keys.toml"'
    with engine(sim_toml(step_ms=5.0, front=front)) as running:
        running.wait_ready()
        found = re.search(r"curve_listening address=(\S+) public_key=(\S+)", running.log())
        assert found
        assert public in found[2]
        curves = {name: Curve(public, pair[1], pair[0]) for name, pair in pairs.items()}
        other_secret, other_public = new_curve_pair()
        curves["wrong server"] = Curve(other_public, pairs["a"][1], pairs["a"][0])
        curves["wrong secret"] = Curve(public, pairs["a"][1], other_secret)
        yield Doors(running, found[1], curves)


def test_a_known_key_gets_the_same_as_a_peer_of_this_machine(doors: Doors):
    with doors.client("a") as remote, doors.running.client() as local:
        options = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
        assert remote.generate("sim", "hello", **options).ids == local.generate("sim", "hello", **options).ids
        assert [model.route for model in remote.models()] == ["sim"]
        assert len(list(remote.stream("sim", "hello", max_tokens=5, ignore_eos=True))) >= 2


@pytest.mark.parametrize("who", ["stranger", "wrong server", "wrong secret"])
def test_an_unknown_key_is_never_heard(doors: Doors, who: str):
    status = doors.running.status()
    assert status is not None
    before = status.counters
    with pytest.raises(EngineError) as caught:
        doors.client(who)
    assert caught.value.code is Code.UNAVAILABLE
    status = doors.running.status()
    assert status is not None
    assert status.counters.protocol_errors == before.protocol_errors  # nothing of it reached the application
    if who == "stranger":
        assert "curve_peer_refused address=127.0.0.1" in doors.running.log()


def test_a_peer_without_curve_is_never_heard(doors: Doors):
    """GHSA-25wp-cf8g-938m and its like: a socket without a handshake must stay silent."""
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(doors.address)
    monitor = plain.get_monitor_socket()
    plain.send_multipart(codec.message(Kind.HELLO, None, Hello()))
    events = set()
    while not events & {zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_CLOSED}:
        assert monitor.poll(5000)
        events.add(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
        events.discard(zmq.EVENT_CONNECTED)
        if zmq.EVENT_DISCONNECTED in events:
            break
    assert not plain.poll(200)
    plain.disable_monitor()
    plain.close()
    context.destroy(0)


def test_the_tenant_is_that_of_the_key(doors: Doors):
    with doors.client("a") as a, doors.client("b") as b, doors.running.client() as local:
        whole = a.generate("sim", "x", max_tokens=3, ignore_eos=True, tenant="b", request="mine", keep_s=60)
        assert a.fetch("mine", "b").completion() == whole  # as "a", whatever it says
        assert local.fetch("mine", "a").completion() == whole
        with pytest.raises(EngineError) as caught:
            b.fetch("mine", "a")
        assert caught.value.code is Code.NOT_FOUND
        a.forget("mine")


def test_a_key_bounds_the_open_requests_of_its_tenant(doors: Doors):
    with doors.client("a") as one, doors.client("a") as two, doors.client("b") as other:
        streams = [client.stream("sim", "x", max_tokens=3000, ignore_eos=True) for client in (one, two)]
        for stream in streams:
            next(stream)
        with pytest.raises(EngineError) as caught:
            two.generate("sim", "x", max_tokens=1)
        assert (caught.value.code, caught.value.is_retryable) == (Code.OVERLOADED, True)
        assert other.generate("sim", "x", max_tokens=1, ignore_eos=True).usage.completion_tokens == 1
        streams[0].cancel()
        until(lambda: streams[0].__next__().__class__.__name__ == "Cancelled")
        assert two.generate("sim", "x", max_tokens=1, ignore_eos=True).usage.completion_tokens == 1
        streams[1].cancel()


def test_what_is_for_this_machine_is_denied(doors: Doors):
    with doors.client("a") as client:
        for operation in (client.status, client.metrics):
            with pytest.raises(EngineError) as caught:
                operation()
            assert caught.value.code is Code.DENIED
        assert client.generate("sim", "x", max_tokens=1, ignore_eos=True).usage.completion_tokens == 1


def test_a_client_with_half_a_key_is_told(doors: Doors):
    with pytest.raises(EngineError, match="40 characters"):
        Client(doors.address, curve=Curve("short", "short", "short"))


@pytest.mark.parametrize(
    ("front", "told"),
    [
        ('tcp = "127.0.0.1:0"', "front.curve_secret_file: is missing"),
        ('curve_keys_file = "x"', "front.curve_keys_file: is for tcp"),
        ('tcp = "127.0.0.1"', "front.tcp"),
    ],
)
def test_there_is_no_tcp_without_curve(tmp_path: Path, front: str, told: str):
    path = tmp_path / "engine.toml"
    path.write_text(sim_toml(front=front))
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", "config", "check", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={**os.environ, "ENGINE_RUN_DIR": str(tmp_path / "run")},
    )
    assert done.returncode == 78
    assert told in done.stderr


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path):
    secret, public = new_curve_pair()
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "secret").chmod(0o644)
    (tmp_path / "keys.toml").write_text(f'[[key]]\ncurve = "{public}"\n')
    front = f'tcp = "127.0.0.1:0"\ncurve_secret_file = "{tmp_path}/secret"\ncurve_keys_file = "{tmp_path}/keys.toml"'
    with engine(sim_toml(front=front)) as running:
        assert running.wait_exit() == 78
        assert "chmod 600" in running.log()
        assert secret not in running.log()
