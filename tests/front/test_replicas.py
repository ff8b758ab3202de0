"""Who may speak for a slot: the expected epoch, with the right token, once."""

import pytest

from engine.front.replicas import ReplicaTable
from ipc.control import Expect
from ipc.errors import Code, ProtocolError
from ipc.messages import WorkerHello, WorkerReady


def table() -> ReplicaTable:
    made = ReplicaTable()
    made.expect(Expect(0, 3, "r", "secret"))
    return made


def test_the_expected_worker_is_let_in_once():
    """IssuuArchive/ocaml-zmq#105: two peers with one routing id, messages lost."""
    made = table()
    view = made.introduce(b"w|0|3|a", WorkerHello("secret", 0, 3, 1))
    assert made.of_identity(b"w|0|3|a") is view
    with pytest.raises(ProtocolError) as caught:
        made.introduce(b"w|0|3|b", WorkerHello("secret", 0, 3, 1))
    assert caught.value.code is Code.DENIED
    assert made.of_identity(b"w|0|3|b") is None


@pytest.mark.parametrize(
    ("identity", "hello"),
    [
        (b"w|0|3|a", WorkerHello("wrong", 0, 3, 1)),
        (b"w|0|3|a", WorkerHello("", 0, 3, 1)),
        (b"w|0|2|a", WorkerHello("secret", 0, 2, 1)),
        (b"w|1|3|a", WorkerHello("secret", 1, 3, 1)),
        (b"w|0|2|a", WorkerHello("secret", 0, 3, 1)),
        (b"A", WorkerHello("secret", 0, 3, 1)),
    ],
)
def test_nobody_else_is(identity: bytes, hello: WorkerHello):
    made = table()
    with pytest.raises(ProtocolError):
        made.introduce(identity, hello)
    assert made.of_identity(identity) is None


def test_a_new_epoch_silences_the_old_worker():
    made = table()
    made.introduce(b"w|0|3|a", WorkerHello("secret", 0, 3, 1))
    made.expect(Expect(0, 4, "r", "other"))
    assert made.of_identity(b"w|0|3|a") is None
    assert made.current(0, 3) is None
    assert made.current(0, 4) is not None


def test_seats_and_outstanding_tokens_come_back():
    view = table().by_slot[0]
    view.ready, view.is_admitted = WorkerReady(3, 2, 10, 16, 100), True
    assert view.can_take
    view.assign(1, 50)
    view.assign(2, 30)
    assert (view.can_take, view.outstanding) == (False, 80)
    view.outstanding -= 20  # emitted for request 1
    view.release(1, 20)
    assert (view.can_take, view.outstanding) == (True, 30)
    view.release(2, 0)
    view.release(2, 0)
    assert view.outstanding == 0
    view.is_paused = True
    assert not view.can_take
