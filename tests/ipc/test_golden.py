"""Exact bytes of every message, both ways; and the specification names what the code has."""

import re
from pathlib import Path

import msgspec
import pytest

from ipc import codec, messages
from ipc.errors import RETRYABLE, Code
from ipc.messages import Kind
from tests.ipc.golden import EVENT_BYTES, EVENTS, FRAMES, MESSAGES, OLDER_EVENTS, OLDER_FRAMES

README = (Path(codec.__file__).parent / "README.md").read_text()


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_bytes_of_every_kind(kind: Kind):
    head, body = MESSAGES[kind]
    golden = [bytes.fromhex(part) for part in FRAMES[kind].split("/")]
    assert codec.message(kind, head, body) == golden
    assert codec.kind_of(golden) is kind
    assert codec.decode(golden[1], type(head), "head") == head
    if body is not None:
        assert codec.decode(golden[2], type(body)) == body
    assert (type(head), None if body is None else type(body)) == codec.SHAPES[kind]


@pytest.mark.parametrize(("kind", "frames"), OLDER_FRAMES)
def test_bytes_of_earlier_versions_decode(kind: Kind, frames: str):
    golden = [bytes.fromhex(part) for part in frames.split("/")]
    head, body = MESSAGES[kind]
    assert codec.decode(golden[1], type(head), "head") == head
    if body is not None:
        assert codec.decode(golden[2], type(body)) == body


@pytest.mark.parametrize(("name", "data"), OLDER_EVENTS)
def test_events_of_earlier_versions_decode(name: str, data: str):
    body = bytes.fromhex(data)
    frames = [codec.ENVELOPES[Kind.EVENTS], codec.encode(messages.EventsHead([len(body)])), body]
    assert codec.decode_events(frames) == [EVENTS[name]]


@pytest.mark.parametrize("name", list(EVENTS))
def test_bytes_of_every_event(name: str):
    data = bytes.fromhex(EVENT_BYTES[name])
    assert codec.encode(EVENTS[name]) == data
    frames = codec.events([EVENTS[name], EVENTS[name]])
    assert frames[2] == data + data
    assert codec.decode_events(frames) == [EVENTS[name]] * 2


def test_every_event_has_golden_bytes():
    assert {type(each) for each in EVENTS.values()} == set(messages.Event.__args__)


def test_a_longer_array_of_a_later_version_decodes():
    """Arrays are append-only: what is new stands at the end, and who does not know it does not mind."""
    data = msgspec.msgpack.encode([11, 1, "later", {"x": 1}])
    assert codec.decode(data, messages.Withdraw, "head") == messages.Withdraw(11, 1)


def test_the_specification_lists_every_kind():
    rows = re.findall(r"^\| (\d+) \| (\w+) \| [^|]+ \| (\w+) \| ([^|]+) \|$", README, re.M)
    listed = {int(number): (name, head) for number, name, head, _ in rows}
    assert listed == {kind.value: (kind.name, codec.SHAPES[kind][0].__name__) for kind in Kind}
    for number, _, _, body in rows:
        shape = codec.SHAPES[Kind(int(number))][1]
        assert shape is None or body.strip() == shape.__name__


@pytest.mark.parametrize(
    "struct",
    [
        messages.Head,
        messages.GenerateHead,
        messages.Hello,
        messages.Generate,
        messages.Welcome,
        messages.Error,
        messages.EventsHead,
        messages.ModelList,
        messages.StatusReport,
        messages.Drain,
        messages.Stop,
        messages.AdminReply,
        messages.RouteHead,
        messages.Tokenize,
        messages.Tokenized,
        messages.Counts,
        messages.OwnerHead,
        messages.Kept,
    ],
)
def test_the_specification_names_every_field_of_a_map(struct: type[msgspec.Struct]):
    (text,) = re.findall(rf"\*\*{struct.__name__}\*\* \(map\): (.*?)\n\n", README + "\n\n", re.S)
    assert [name for name in struct.__struct_fields__ if f"`{name}`" not in text] == []


@pytest.mark.parametrize("struct", [messages.ReplicaReport, messages.RouteReport, messages.Counters, messages.Model])
def test_the_specification_names_every_field_of_a_report(struct: type[msgspec.Struct]):
    assert [name for name in struct.__struct_fields__ if f"`{name}`" not in README] == []


@pytest.mark.parametrize(
    "struct",
    [
        messages.WorkerHello,
        messages.WorkerReady,
        messages.Emissions,
        messages.Ending,
        messages.Report,
        messages.Assign,
        messages.Withdraw,
        messages.Ask,
        messages.Answer,
    ],
)
def test_the_specification_has_the_positions_of_an_array(struct: type[msgspec.Struct]):
    (row,) = re.findall(rf"^\| {struct.__name__} \| (.*) \|$", README, re.M)
    assert re.findall(r"`(\w+)`", row) == list(struct.__struct_fields__)


def test_the_specification_lists_events_and_codes():
    assert set(re.findall(r"^\| `(\w+)` \| `(?:index|code|completion)", README, re.M)) == set(EVENTS)
    codes = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \|$", README, re.M))
    assert codes == {code.value: "yes" if code in RETRYABLE else "no" for code in Code}


def test_the_example_is_right():
    text = README[README.index("## Example") : README.index("## Admin")]
    frames = [bytes.fromhex(found) for found in re.findall(r"^    ((?:[0-9A-F]{2} ?)+)", text, re.M)]
    assert frames[:3] == codec.message(Kind.HELLO, None, messages.Hello(client="me"))
    assert frames[3:5] == codec.message(Kind.GENERATE, messages.GenerateHead("1", "sim"))
    assert codec.decode(frames[5], messages.Generate) == messages.Generate("hi", max_tokens=4)
