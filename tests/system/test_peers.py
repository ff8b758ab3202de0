"""Peers that ask too much, too late, twice, garbage, or stop reading: each gets a clear error, nobody else notices."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from ipc import codec
from ipc.client import Client, client_address
from ipc.errors import EngineError
from ipc.messages import (
    Cancelled,
    Delta,
    Empty,
    Error,
    Expired,
    Failed,
    Finished,
    Generate,
    GenerateHead,
    Head,
    Hello,
    Kind,
)
from tests.system.harness import ROOT, EngineProcess, engine, sim_toml, until


class RawPeer:
    """A DEALER that sends whatever frames a test likes."""

    def __init__(self, run_dir: str, name: str = "client", identity: bytes = b"", receive_hwm: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, receive_hwm)
        if identity:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(f"ipc://{run_dir}/{name}")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def hello(self) -> None:
        self.send(*codec.message(Kind.HELLO, None, Hello()))
        assert codec.kind_of(self.receive()) is Kind.WELCOME

    def generate(self, request: str, **fields: object) -> None:
        options = {"max_tokens": 3000, "ignore_eos": True, **fields}
        self.send(*codec.message(Kind.GENERATE, GenerateHead(request, "sim"), Generate("x", **options)))

    def receive(self, timeout_s: float = 5.0) -> list[bytes]:
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        return self.socket.recv_multipart()

    def receive_kind(self, kind: Kind) -> list[bytes]:
        while True:
            frames = self.receive()
            if codec.kind_of(frames) is kind:
                return frames

    def error(self) -> Error:
        return codec.decode(self.receive_kind(Kind.ERROR)[2], Error)

    def close(self) -> None:
        self.context.destroy(0)


@contextmanager
def peer(running: EngineProcess, **options: object) -> Iterator[RawPeer]:
    made = RawPeer(running.run_dir, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def running() -> Iterator[EngineProcess]:
    toml = sim_toml(
        seats=4,
        step_ms=4,
        num_blocks=1200,
        queue="max_queued = 16",
        front="heartbeat_s = 0.2\noutbox_messages_max = 1000\noutbox_bytes_max = 65536\nsend_hwm = 4",
    )
    with engine(toml) as made:
        yield made.wait_ready()


@pytest.fixture
def client(running: EngineProcess) -> Iterator[Client]:
    """A neighbour: whatever happens in the test, its own stream is untouched and all blocks come back."""
    with running.client() as made:
        neighbour = made.stream("sim", "neighbour", max_tokens=60, ignore_eos=True, seed=1)
        yield made
        events = list(neighbour)
        assert isinstance(events[-1], Finished)
        assert sum(len(each.ids) for each in events) == 60
        until(lambda: is_idle(running), what="blocks and seats back to base")
        assert made.generate("sim", "x", max_tokens=2, ignore_eos=True).reason == "length"


def is_idle(running: EngineProcess) -> bool:
    report = running.status()
    counters = report.counters
    is_free = all(each.num_free_blocks == each.num_blocks and each.num_in_flight == 0 for each in report.replicas)
    return is_free and counters.num_open == counters.num_queued == 0


def test_an_overflowing_queue_refuses_at_once_and_loses_nobody(running: EngineProcess, client: Client):
    """sgl-project/sglang#33858: some clients never got any answer."""
    streams = [client.stream("sim", f"p{number}", max_tokens=30, ignore_eos=True) for number in range(200)]
    ends = [list(each)[-1] for each in streams]
    refused = [each for each in ends if isinstance(each, Failed)]
    assert len(ends) == 200
    assert {each.code for each in refused} == {"overloaded"}
    assert all(each.retry_after_s > 0 for each in refused)
    assert sum(isinstance(each, Finished) for each in ends) == 200 - len(refused)
    assert len(refused) >= 150


def test_a_deadline_ends_a_queued_request_when_it_passes_not_when_a_seat_is_free(client: Client):
    """triton-inference-server/server#7512: expiry was told only when the running job ended."""
    running = [client.stream("sim", "x", max_tokens=2000, ignore_eos=True) for _ in range(4)]
    for each in running:
        next(each)  # every seat is taken, the neighbour's too
    started = time.monotonic()
    last = list(client.stream("sim", "late", deadline_ms=400))[-1]
    assert isinstance(last, Expired)
    assert not last.has_run
    assert 0.35 < time.monotonic() - started < 0.7
    for each in running:
        each.cancel()
        assert isinstance(list(each)[-1], Cancelled)


def test_a_deadline_ends_a_running_request_too(client: Client):
    started = time.monotonic()
    events = list(client.stream("sim", "x", max_tokens=2000, ignore_eos=True, deadline_ms=300))
    assert isinstance(events[-1], Expired)
    assert events[-1].has_run
    assert events[-1].completion_tokens == sum(len(each.ids) for each in events if isinstance(each, Delta))
    assert 0.25 < time.monotonic() - started < 0.6


def test_cancel_in_every_state(running: EngineProcess, client: Client):
    streams = [client.stream("sim", "x", max_tokens=2000, ignore_eos=True) for _ in range(10)]
    next(streams[0])
    for each in reversed(streams):  # queued ones first, then streaming, then perhaps just dispatched
        each.cancel()
    for each in streams:
        events = list(each)
        assert isinstance(events[-1], Cancelled)
        assert sum(isinstance(event, Cancelled) for event in events) == 1
    finished = client.stream("sim", "x", max_tokens=1, ignore_eos=True)
    assert isinstance(list(finished)[-1], Finished)
    finished.cancel()
    client.cancel("never was")


def test_a_client_that_leaves_frees_its_blocks_within_two_seconds(running: EngineProcess, client: Client):
    """sgl-project/mini-sglang#15, pegainfer-project/pegainfer#215: decode ran on to the end."""
    with running.client() as leaving:
        for _ in range(2):
            next(leaving.stream("sim", "x", max_tokens=3000, ignore_eos=True))
        assert running.status().counters.num_open >= 2
        started = time.monotonic()
    until(lambda: running.status().counters.num_open <= 1, 2.0, "its requests are gone")
    assert time.monotonic() - started < 2.0


CLIENT_THAT_DIES = """
import os, signal, sys
from ipc.client import Client
client = Client(sys.argv[1])
next(client.stream("sim", "x", max_tokens=3000, ignore_eos=True))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_killed_in_mid_stream_is_noticed_and_harms_nobody(running: EngineProcess, client: Client):
    """PrimeIntellect-ai/verifiers#951, zeromq/jzmq#158: the reply to a vanished peer raised."""
    before = running.status().counters
    dead = subprocess.run(
        [sys.executable, "-c", CLIENT_THAT_DIES, client_address(running.run_dir)], cwd=ROOT, timeout=20, check=False
    )
    assert dead.returncode == -signal.SIGKILL
    until(lambda: running.status().counters.cancelled > before.cancelled, what="its request is cancelled")
    after = running.status().counters
    assert after.lost_peers == before.lost_peers + 1
    assert after.internal_errors == before.internal_errors


def test_nobody_cancels_a_request_of_somebody_else(running: EngineProcess, client: Client):
    """vllm-project/vllm#25067: abort of an unknown id raised; another client's id must not be reachable."""
    mine = client.stream("sim", "x", max_tokens=60, ignore_eos=True, request="shared-name")
    with peer(running) as other:
        other.hello()
        for name in ("shared-name", "unknown", ""):
            other.send(*codec.message(Kind.CANCEL, Head(name), Empty()))
            assert other.error().code == "not_found"
    assert isinstance(list(mine)[-1], Finished)


def test_a_duplicate_id_is_refused_and_the_first_goes_on(running: EngineProcess, client: Client):
    with peer(running) as twice:
        twice.hello()
        twice.generate("same", max_tokens=50)
        twice.generate("same", max_tokens=50)
        error = twice.error()
        assert (error.code, error.field, error.request) == ("duplicate", "request", "same")
        ids: list[int] = []
        while len(ids) < 50:
            for event in codec.decode_events(twice.receive_kind(Kind.EVENTS)):
                assert event.request == "same"
                ids += event.ids
        twice.generate("same", max_tokens=1)  # free again
        assert twice.receive_kind(Kind.EVENTS)


def garbage() -> list[tuple[str, list[bytes], str]]:
    hello = codec.ENVELOPES[Kind.HELLO]
    generate = codec.ENVELOPES[Kind.GENERATE]
    deep = b"\x91" * 100_000 + b"\xc0"
    field = b"\x82\xa6prompt\xa1x\xa1z" + deep
    return [
        ("one empty frame", [b""], "protocol"),
        ("not an envelope", [b"GET / HTTP/1.1", b""], "protocol"),
        ("fifty frames", [hello, b"\x80", b"\x80", *[b""] * 47], "no_session"),
        ("seventy frames", [hello, b"\x80", *[b""] * 68], "protocol"),
        ("no head", [hello], "protocol"),
        ("truncated body", [hello, b"\x80", b"\x83\xa5ma"], "protocol"),
        ("another major", [b"EN\x09\x01\x00", b"\x80", b"\x80"], "unsupported"),
        ("unknown kind", [b"EN\x01\xfa\x00", b"\x80", b"\x80"], "unsupported"),
        ("a worker's kind", [codec.ENVELOPES[Kind.EMISSIONS], b"\x90"], "unsupported"),
        ("pickle", [pickle.dumps(os.getpid), pickle.dumps(1)], "protocol"),
        ("wrong type", [generate, b"\x81\xa7request\x01", b"\x80"], "invalid"),
        ("deep unknown field", [generate, codec.encode(GenerateHead("d", "sim")), field], "finished"),
        ("deep body", [generate, codec.encode(GenerateHead("d", "sim")), deep], "failed"),
    ]


@pytest.mark.parametrize(("frames", "expected"), [pytest.param(*each[1:], id=each[0]) for each in garbage()])
def test_garbage_from_a_peer(running: EngineProcess, client: Client, frames: list[bytes], expected: str):
    """sgl-project/sglang#21435 (pickle from a socket), msgspec/msgspec#1033 (depth), and wrong frame shapes."""
    before = running.status().counters
    with peer(running) as rude:
        if expected != "no_session":
            rude.hello()
        rude.send(*frames)
        if expected == "no_session":
            rude.send(*codec.message(Kind.STATUS, None, Empty()))
            assert codec.kind_of(rude.receive()) in {Kind.WELCOME, Kind.ERROR}
        elif expected in {"failed", "finished"}:
            (event,) = codec.decode_events(rude.receive_kind(Kind.EVENTS))[-1:]
            assert isinstance(event, Failed | Delta)
        else:
            assert rude.error().code == expected
    after = running.status().counters
    assert after.internal_errors == before.internal_errors


def test_an_oversized_frame_is_dropped_with_its_connection(running: EngineProcess, client: Client):
    with peer(running) as rude:
        rude.hello()
        rude.send(codec.ENVELOPES[Kind.GENERATE], b"\x80", b"x" * 100_000_000)
    assert psutil.Process(running.pid).memory_info().rss < 400e6


def test_a_chosen_routing_id_is_refused(running: EngineProcess, client: Client):
    """IssuuArchive/ocaml-zmq#105, zeromq: with two peers of one id the second is silently ignored."""
    with peer(running, identity=b"A") as first:
        first.send(*codec.message(Kind.HELLO, None, Hello()))
        assert first.error().code == "denied"


def test_a_stranger_cannot_speak_for_a_worker(running: EngineProcess, client: Client):
    with peer(running, name="worker", identity=b"w|0|1|x") as liar:
        liar.send(codec.ENVELOPES[Kind.WORKER_HELLO], codec.encode(["guess", 0, 1, 1]))
        assert liar.error().code == "denied"
        liar.send(codec.ENVELOPES[Kind.WORKER_READY], codec.encode([1, 999, 1, 1, 1]))
    assert running.status().replicas[0].num_seats == 4


def test_who_does_not_read_is_cut_off_and_memory_stays_bounded(running: EngineProcess, client: Client):
    before = running.status().counters
    with peer(running, receive_hwm=1) as lazy:
        lazy.hello()
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(0.2):
                lazy.send(*codec.message(Kind.PING, None, Empty()))

        beating = threading.Thread(target=beat)
        beating.start()
        lazy.generate("unread", max_tokens=4000, stop=["never" * 10])
        try:
            until(lambda: cut_off(running, before.slow_readers), 60.0, "the slow reader is cut off")
        finally:
            stop.set()
            beating.join()
    assert running.status().counters.outbox_bytes <= 65_536
    assert psutil.Process(running.pid).memory_info().rss < 400e6


def cut_off(running: EngineProcess, before: int) -> bool:
    return running.status().counters.slow_readers > before


def test_listeners_are_local(running: EngineProcess, client: Client):
    """Every default bind is a unix socket in a directory that only its owner can enter."""
    connections = [each for pid in running.processes() for each in psutil.Process(pid).net_connections("inet")]
    assert [each for each in connections if each.status == psutil.CONN_LISTEN] == []
    assert Path(running.run_dir).stat().st_mode & 0o777 == 0o700


def test_two_unequal_workers_share_by_speed():
    toml = sim_toml(replicas=2, seats=4, step_ms=6, sim="speeds = [1.0, 3.0]")
    with engine(toml) as running, running.wait_ready().client() as client:
        waiting = [client.stream("sim", f"warm {number}", max_tokens=40, ignore_eos=True) for number in range(8)]
        assert all(isinstance(list(each)[-1], Finished) for each in waiting)
        until(lambda: sum(each.num_tokens for each in running.replicas()) == 320, what="reports")
        before = [each.num_tokens for each in running.replicas()]
        many = [client.stream("sim", f"{number}", max_tokens=40, ignore_eos=True) for number in range(100)]
        ends = Counter(type(list(each)[-1]).__name__ for each in many)
        assert ends == {"Finished": 100}
        until(lambda: sum(each.num_tokens for each in running.replicas()) == 4320, what="reports")
        slow, fast = (each.num_tokens - base for each, base in zip(running.replicas(), before, strict=True))
        assert fast > 1.8 * slow


def test_a_deadline_counts_from_arrival_whatever_the_worker_is_doing():
    """ls1intum/edutelligence#851: its clock started late. Here the prompt's step takes longer than it."""
    with engine(sim_toml(step_ms=700)) as slow, slow.wait_ready().client() as client:
        started = time.monotonic()
        (end,) = list(client.stream("sim", "x" * 2000, deadline_ms=500, ignore_eos=True))
        assert isinstance(end, Expired)
        assert 0.45 < time.monotonic() - started < 0.7
        until(lambda: is_idle(slow), what="its seat and blocks are free again")


def test_an_unavailable_engine_is_said_to_be_one(tmp_path: Path):
    started = time.monotonic()
    with pytest.raises(EngineError, match="is an engine running there"):
        Client(client_address(str(tmp_path)), hello_s=0.5)
    assert time.monotonic() - started < 2.0
