"""Sessions on a real socket pair, with a clock moved by hand: heartbeats, lateness, strangers, bounds."""

import msgspec
import pytest
import zmq

from engine.config import Front as FrontConfig
from engine.front.desk import Desk
from engine.front.sessions import Session
from ipc import codec
from ipc.channel import Channel, router
from ipc.errors import Code, ProtocolError
from ipc.messages import Empty, Error, Head, Hello, Kind
from tests.fakes import FakeClock

HELLO = codec.message(Kind.HELLO, None, Hello())
PING = codec.message(Kind.PING, None, Empty())
FIRST, SECOND = b"\0one", b"\0two"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gone() -> list[tuple[int, Code]]:
    return []


@pytest.fixture
def desk(clock: FakeClock, gone: list[tuple[int, Code]]):
    context = zmq.Context()
    channel = Channel(router(context, 1 << 20, 10))

    def on_gone(session: Session, code: Code) -> None:
        gone.append((session.number, code))

    config = FrontConfig(sessions_max=2, heartbeat_s=1.0, heartbeat_misses=3)
    made = Desk(channel, config, clock, on_gone)
    yield made
    channel.close(0)
    context.destroy(0)


def open_session(desk: Desk, identity: bytes) -> Session:
    """As HELLO does; the peer of these tests is not connected, so nothing is sent to it."""
    from engine.front.outbox import Outbox

    return desk.sessions.open(identity, "", Outbox(2, 100), desk._clock.now())


def test_strangers_have_no_state(desk: Desk):
    assert desk.admit([FIRST, *PING]) is None
    assert len(desk.sessions) == 0


def test_a_verb_is_handed_up_with_its_session(desk: Desk):
    session = open_session(desk, FIRST)
    status = codec.message(Kind.STATUS, None, Empty())
    assert desk.admit([FIRST, *status]) == (session, Kind.STATUS, status)


def test_silence_ends_a_session_and_a_word_keeps_it(desk: Desk, clock: FakeClock, gone: list):
    kept, lost = open_session(desk, FIRST), open_session(desk, SECOND)
    for _ in range(7):
        clock.advance(0.5)
        kept.heard_at = clock.now()
        desk.end_silent()
    assert gone == [(lost.number, Code.CANCELLED)]
    assert desk.num_lost_peers == 1


def test_the_time_this_process_stood_still_is_not_held_against_anybody(desk: Desk, clock: FakeClock, gone: list):
    open_session(desk, FIRST)
    clock.advance(0.5)
    desk.end_silent()
    clock.advance(60.0)
    desk.end_silent()
    assert gone == []
    for _ in range(5):
        clock.advance(0.5)
        desk.end_silent()
    assert len(gone) == 1


def test_bye_and_garbage_end_a_session_other_mistakes_do_not(desk: Desk, gone: list):
    first, second = open_session(desk, FIRST), open_session(desk, SECOND)
    desk.refuse(FIRST, ProtocolError("unknown kind", Code.UNSUPPORTED))
    assert gone == []
    desk.refuse(FIRST, ProtocolError("garbage"))
    desk.admit([SECOND, *codec.message(Kind.BYE, None, Empty())])
    assert gone == [(first.number, Code.PROTOCOL), (second.number, Code.CANCELLED)]
    assert desk.num_protocol_errors == 2


@pytest.mark.parametrize(
    ("identity", "message", "code"),
    [
        (b"A", HELLO, Code.DENIED),
        (FIRST, HELLO[:2], Code.PROTOCOL),
        (FIRST, codec.message(Kind.HELLO, Head(), Hello(major=9)), Code.UNSUPPORTED),
    ],
)
def test_a_wrong_hello(desk: Desk, identity: bytes, message: list[bytes], code: Code):
    with pytest.raises(ProtocolError) as caught:
        desk.admit([identity, *message])
    assert caught.value.code is code
    assert len(desk.sessions) == 0


def test_sessions_are_bounded(desk: Desk):
    open_session(desk, FIRST)
    open_session(desk, SECOND)
    assert desk.admit([b"\0three", *HELLO]) is None
    assert len(desk.sessions) == 2


def test_an_overflowing_outbox_ends_that_session_once(desk: Desk, gone: list):
    session = open_session(desk, FIRST)
    session.outbox.push([b"x" * 90])
    desk.sessions.clogged.add(session)
    desk.error(session, Error("invalid", "y" * 90))
    desk.error(session, Error("invalid", "z" * 90))
    assert gone[0] == (session.number, Code.SLOW_READER)
    assert desk.num_slow_readers == len(gone) == 1
    assert msgspec.structs.asdict(desk.statistics()) == {"num_sessions": 0, "num_clogged": 0, "outbox_bytes": 0}
