"""Bounds, order, and that nothing is lost when a peer reads in bits."""

from engine.front.outbox import Outbox


def test_bounds_by_number_and_by_bytes():
    outbox = Outbox(2, 10)
    assert outbox.push([b"1234", b"5"])
    assert not outbox.push([b"123456"])
    assert outbox.push([b"12345"])
    assert not outbox.push([b""])
    assert (len(outbox), outbox.num_bytes) == (2, 10)


def test_it_drains_in_order_and_keeps_what_is_refused():
    outbox = Outbox(10, 100)
    for number in range(4):
        outbox.push([bytes([number])])
    taken = []

    def send(message: list[bytes]) -> bool:
        if len(taken) == 3:
            return False
        taken.append(message[0])
        return True

    assert outbox.drain(send) == 3
    assert taken == [b"\0", b"\1", b"\2"]
    assert (len(outbox), outbox.num_bytes) == (1, 1)
    assert outbox.statistics().num_messages == 1
