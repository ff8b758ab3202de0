"""What expires when, and that long deadlines of ended requests keep no memory."""

from math import inf

from engine.front.deadlines import GARBAGE_MIN, Deadlines


def test_they_come_due_in_order_and_once():
    deadlines = Deadlines(lambda number: number != 3)
    for at, number in ((5.0, 1), (2.0, 2), (3.0, 3), (inf, 4), (9.0, 5)):
        deadlines.add(at, number, 5)
    assert deadlines.next_at() == 2.0
    assert deadlines.due(1.9) == []
    assert deadlines.due(5.0) == [2, 1]
    assert deadlines.due(5.0) == []
    assert deadlines.next_at() == 9.0
    assert deadlines.due(10.0) == [5]
    assert deadlines.next_at() == inf


def test_a_week_long_deadline_of_an_ended_request_is_swept():
    deadlines = Deadlines(lambda number: number == 1)
    for number in range(1, 5000):
        deadlines.add(600_000.0, number, num_open=1)
    assert len(deadlines) <= 2 * GARBAGE_MIN
    assert deadlines.due(700_000.0) == [1]
