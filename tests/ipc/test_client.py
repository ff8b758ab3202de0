"""The client against a front that misbehaves: one end per request, whatever happens, and an exit in two seconds."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipc import codec
from ipc.client import Client
from ipc.errors import Code, EngineError
from ipc.messages import Delta, Error, Failed, Finished, GenerateHead, Head, Kind, Usage
from tests.ipc.fake_front import FakeFront

ROOT = Path(__file__).resolve().parents[2]
END = Finished("1", 0, "b", [98], "length", Usage(1, 1), 7)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/client"


def request_of(message: list[bytes]) -> str:
    return codec.decode(message[1], GenerateHead, "head").request


def one_delta(kind: Kind, _: bytes, message: list[bytes]) -> list[list[bytes]]:
    """Starts every request and never ends it."""
    return [codec.events([Delta(request_of(message), 0, "a", [97])])] if kind is Kind.GENERATE else []


def test_nobody_says_welcome(address: str):
    with FakeFront(address, None), pytest.raises(EngineError, match="no WELCOME") as caught:
        Client(address, hello_s=0.3)
    assert caught.value.code is Code.UNAVAILABLE


def test_a_refused_hello_is_told(address: str):
    refusal = codec.message(Kind.ERROR, None, Error("overloaded", "too many sessions", retry_after_s=2.0))
    with FakeFront(address, lambda *_: [refusal]), pytest.raises(EngineError, match="too many sessions") as caught:
        Client(address)
    assert caught.value.retry_after_s == 2.0


def test_a_front_that_dies_ends_each_open_request_once_and_at_once(address: str):
    front = FakeFront(address, one_delta)
    with Client(address) as client:
        streams = [client.stream("r", "x") for _ in range(3)]
        for each in streams:
            assert isinstance(next(each), Delta)
        died_at = time.monotonic()
        front.close()
        for each in streams:
            (end,) = list(each)
            assert isinstance(end, Failed)
            assert end.code == "unavailable"
        assert time.monotonic() - died_at < 0.5
        with FakeFront(address, lambda kind, *_: [codec.events([END])] if kind is Kind.GENERATE else []):
            answer = None
            while answer is None and time.monotonic() - died_at < 10:
                try:
                    answer = client.generate("r", "x", request="1")
                except EngineError as error:
                    if error.code not in {Code.UNAVAILABLE, Code.INTERNAL}:
                        raise


def test_a_front_that_forgot_us_gets_a_new_hello(address: str):
    def answer(kind: Kind, identity: bytes, message: list[bytes]) -> list[list[bytes]]:
        if kind is Kind.GENERATE:
            return [codec.message(Kind.ERROR, None, Error("no_session", "who are you"))]
        return []

    with FakeFront(address, answer) as front, Client(address) as client:
        (end,) = list(client.stream("r", "x"))
        assert (end.code, end.message) == ("unavailable", "who are you")
        deadline = time.monotonic() + 5
        while front.heard.count(Kind.HELLO) < 2 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert front.heard.count(Kind.HELLO) >= 2


def test_a_silent_front_is_noticed(address: str):
    """Connected, and yet nothing comes: only the heartbeat can tell."""
    with FakeFront(address, one_delta) as front, Client(address) as client:
        stream = client.stream("r", "x")
        next(stream)
        front.is_deaf = True
        deaf_at = time.monotonic()
        (end,) = list(stream)
        assert end.code == "unavailable"
        assert "nothing heard" in end.message
        assert 0.8 < time.monotonic() - deaf_at < 2.5


@pytest.mark.parametrize("second", [Delta("1", 0, "a", [97]), Delta("1", 2, "c", [99])], ids=["doubled", "lost"])
def test_lost_or_doubled_tokens_end_that_stream(address: str, second: Delta):
    def answer(kind: Kind, identity: bytes, message: list[bytes]) -> list[list[bytes]]:
        return [codec.events([Delta("1", 0, "a", [97]), second])] if kind is Kind.GENERATE else []

    with FakeFront(address, answer) as front, Client(address) as client:
        events = list(client.stream("r", "x"))
        assert isinstance(events[0], Delta)
        assert (events[-1].code, events[-1].message) == ("internal", "tokens of this stream were lost or doubled")
        deadline = time.monotonic() + 5
        while Kind.CANCEL not in front.heard and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert Kind.CANCEL in front.heard


def test_unreadable_events_end_requests_instead_of_hanging_them(address: str):
    broken = [codec.ENVELOPES[Kind.EVENTS], b"\x81\xa7lengths\x91\x05", b"\xc1\xc1\xc1\xc1\xc1"]
    with FakeFront(address, lambda kind, *_: [broken] if kind is Kind.GENERATE else []), Client(address) as client:
        (end,) = list(client.stream("r", "x"))
        assert end.code == "unavailable"
        assert client.statistics().num_protocol_errors == 1


def test_an_open_id_is_not_used_twice(address: str):
    with FakeFront(address, one_delta), Client(address) as client:
        first = client.stream("r", "x", request="mine")
        with pytest.raises(EngineError) as caught:
            client.stream("r", "x", request="mine")
        assert (caught.value.code, caught.value.field) == (Code.DUPLICATE, "request")
        assert isinstance(next(first), Delta)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_tokens": -1}, "max_tokens"), ({"stop": ["a"] * 17}, "stop"), ({"deadline_ms": -5}, "deadline_ms")],
)
def test_options_out_of_bounds_are_refused_before_they_are_sent(address: str, options: dict, field: str):
    with FakeFront(address, one_delta) as front, Client(address) as client:
        with pytest.raises(EngineError) as caught:
            client.generate("r", "x", **options)
        assert (caught.value.code, caught.value.field) == (Code.INVALID, field)
        assert Kind.GENERATE not in front.heard


def test_several_threads_share_a_client(address: str):
    def answer(kind: Kind, identity: bytes, message: list[bytes]) -> list[list[bytes]]:
        if kind is not Kind.GENERATE:
            return []
        name = request_of(message)
        return [
            codec.events([Delta(name, 0, name, [1])]),
            codec.events([Finished(name, 1, "", [2], "length", Usage(1, 2))]),
        ]

    with FakeFront(address, answer), Client(address) as client:
        texts: list[str] = []

        def ask() -> None:
            texts.extend(client.generate("r", "x").text for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        assert sorted(texts, key=int) == [str(number) for number in range(1, 161)]
        assert client.statistics().num_open == 0


def test_leaving_a_stream_early_cancels_it(address: str):
    def answer(kind: Kind, identity: bytes, message: list[bytes]) -> list[list[bytes]]:
        if kind is Kind.CANCEL:
            assert codec.decode(message[1], Head, "head").request == "1"
        return one_delta(kind, identity, message)

    with FakeFront(address, answer) as front, Client(address) as client:
        with client.stream("r", "x") as stream:
            next(stream)
        deadline = time.monotonic() + 5
        while Kind.CANCEL not in front.heard and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert Kind.CANCEL in front.heard


PROGRAMS = {
    "connects to nothing": "Client('ipc:///tmp/nobody-is-here', hello_s=0.2)",
    "exits without closing": "client = Client(sys.argv[1])\nstream = client.stream('r', 'x'); next(stream)",
    "fails in a stream": "for _ in Client(sys.argv[1]).stream('r', 'x'): raise SystemExit(3)",
    "is interrupted in a stream": "for event in Client(sys.argv[1]).stream('r', 'x'): print('got', flush=True)",
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_a_program_ends_within_two_seconds(address: str, program: str):
    """zeromq/pyzmq#1003, #1167, #1757, zeromq/libzmq#2586: exit hung in the end of the context."""
    # A shell's background jobs ignore SIGINT, and so would a child of this test.
    setup = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom ipc.client import Client\n"
    )
    with (
        FakeFront(address, one_delta),
        subprocess.Popen(
            [sys.executable, "-c", setup + PROGRAMS[program], address],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child,
    ):
        try:
            started = time.monotonic()
            if "interrupted" in program:
                assert child.stdout.readline() == b"got\n"
                started = time.monotonic()
                child.send_signal(signal.SIGINT)
            child.communicate(timeout=10)
            assert time.monotonic() - started < 2.0
        finally:
            child.kill()
