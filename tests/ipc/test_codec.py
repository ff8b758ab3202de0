"""Whatever a peer sends becomes a ProtocolError with a code and a field, never another exception, never a crash."""

import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import codec
from ipc.errors import HTTP_STATUS, Code, EngineError, ProtocolError
from ipc.messages import ENTRIES_MAX, EventsHead, Generate, GenerateHead, Hello, Kind

HELLO = codec.ENVELOPES[Kind.HELLO]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], Code.PROTOCOL),
        ([b""], Code.PROTOCOL),
        ([HELLO], Code.PROTOCOL),
        ([HELLO] * 65, Code.PROTOCOL),
        ([b"EN\x01\x01", b"\x80"], Code.PROTOCOL),
        ([b"XX\x01\x01\x00", b"\x80"], Code.PROTOCOL),
        ([b"EN\x02\x01\x00", b"\x80"], Code.UNSUPPORTED),
        ([b"EN\x01\xff\x00", b"\x80"], Code.UNSUPPORTED),
        ([b"EN\x01\x01\x01", b"\x80"], Code.UNSUPPORTED),
        ([HELLO, b"x" * (codec.HEAD_BYTES_MAX + 1)], Code.TOO_LARGE),
    ],
)
def test_wrong_shapes(frames: list[bytes], code: Code):
    with pytest.raises(ProtocolError) as caught:
        codec.kind_of(frames)
    assert caught.value.code is code


def test_fifty_frames_are_within_the_limit():
    assert codec.kind_of([HELLO, b"\x80", *[b""] * 48]) is Kind.HELLO


@pytest.mark.parametrize(
    ("struct", "value", "field"),
    [
        (GenerateHead, {"request": "1"}, "route"),
        (GenerateHead, {"request": 1, "route": "r"}, "request"),
        (GenerateHead, {"request": "x" * 65, "route": "r"}, "request"),
        (GenerateHead, {"request": "1", "route": "r", "deadline_ms": -1}, "deadline_ms"),
        (Generate, {"prompt": 3}, "prompt"),
        (Generate, {"prompt": [1, -1]}, "prompt[1]"),
        (Generate, {"prompt": [2**31]}, "prompt[0]"),
        (Generate, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (Generate, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        (Generate, {"prompt": "x", "stop": [""]}, "stop[0]"),
        (Generate, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (Generate, {"prompt": "x", "seed": 2**63}, "seed"),
        (Generate, {"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
        (Hello, {"client": "x" * 65}, "client"),
        (EventsHead, {"lengths": [0] * (ENTRIES_MAX + 1)}, "lengths"),
    ],
)
def test_a_wrong_field_is_named(struct: type[msgspec.Struct], value: object, field: str):
    with pytest.raises(ProtocolError) as caught:
        codec.decode(msgspec.msgpack.encode(value), struct)
    assert caught.value.code is Code.INVALID
    assert caught.value.field == field


@pytest.mark.parametrize("data", [b"", b"\x81", b"\xc1", b"\x83\xa6prompt", b"\x81\xa6prompt\xa2\xff\xfe", b"\x80\x80"])
def test_broken_msgpack(data: bytes):
    with pytest.raises(ProtocolError):
        codec.decode(data, Generate)


def test_unknown_fields_are_ignored():
    assert codec.decode(msgspec.msgpack.encode({"prompt": "x", "later": {"a": [1]}}), Generate) == Generate("x")


DEEP = """
import sys, threading
from ipc import codec
from ipc.errors import ProtocolError
from ipc.messages import Generate
threading.stack_size(256 * 1024)
def decode():
    deep = b"\\x91" * 100_000 + b"\\xc0"
    known, unknown = b"\\x81\\xa6prompt", b"\\x82\\xa6prompt\\xa1x\\xa1z"
    for data in (deep, known + deep, unknown + deep, b"\\x81\\xa1z" + b"\\x81\\xa1a" * 100_000 + b"\\xc0"):
        try:
            codec.decode(data, Generate)
        except ProtocolError as error:
            print("refused", error.code.value)
thread = threading.Thread(target=decode)
thread.start()
thread.join()
"""


def test_very_deep_input_on_a_small_stack():
    """msgspec/msgspec#1033, #646: recursion error, or a stack crash on small thread stacks."""
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", DEEP], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended
    assert ended.stdout.count("refused") == 4


class Trap:
    """Unpickling this would leave a mark."""

    fired = False

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.putenv, ("ENGINE_TRAP", "fired"))


def test_a_pickle_is_just_garbage():
    """sgl-project/sglang#21435, vllm-project/vllm#12055: code execution from a socket."""
    data = pickle.dumps(Trap())
    for frames in ([data], [data, data], [HELLO, data, data]):
        with pytest.raises(ProtocolError):
            codec.decode(frames[-1], Hello) if codec.kind_of(frames) else None
    assert os.getenv("ENGINE_TRAP") is None


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=40), max_size=5), st.sampled_from(list(Kind)))
def test_random_frames_raise_nothing_else(frames: list[bytes], kind: Kind):
    for candidate in (frames, [codec.ENVELOPES[kind], *frames]):
        with suppress(ProtocolError):
            head, body = codec.SHAPES[codec.kind_of(candidate)]
            codec.decode(candidate[1], head, "head")
            if body is not None and len(candidate) > 2:
                codec.decode(candidate[2], body)
            codec.decode_events(candidate)


@pytest.mark.parametrize(("lengths", "body"), [([1], b""), ([], b"x"), ([2, 2], b"\x80\x80"), ([1, 1], b"\x80\x80")])
def test_events_whose_lengths_disagree(lengths: list[int], body: bytes):
    frames = [codec.ENVELOPES[Kind.EVENTS], codec.encode(EventsHead(lengths)), body]
    with pytest.raises(ProtocolError):
        codec.decode_events(frames)


def test_small_stacks_are_not_left_behind():
    assert threading.stack_size() == 0


def test_every_code_has_a_status_and_errors_say_what_they_know():
    assert set(HTTP_STATUS) == set(Code)
    assert str(EngineError(Code.INVALID, "no", "prompt")) == "invalid: no (field prompt)"
    assert EngineError(Code.OVERLOADED, "full").is_retryable
    assert not EngineError(Code.INVALID, "no").is_retryable
