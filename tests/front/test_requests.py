"""Every move of a request, and the fence: what is late, doubled or out of order never counts."""

import itertools

import pytest

from engine.front.requests import (
    TRANSITIONS,
    PriorityClass,
    Request,
    RequestState,
    RequestTable,
    advance,
    priority_class,
)
from ipc.errors import Code, EngineError
from ipc.messages import Emissions

FINAL = {"finished", "failed", "cancelled", "expired"}
LEGAL = (
    {("queued", to) for to in ("dispatched", "failed", "cancelled", "expired")}
    | {("dispatched", to) for to in FINAL | {"streaming", "queued"}}
    | {("streaming", to) for to in FINAL | {"queued"}}
)


def request(table: RequestTable, name: str = "a", **fields: object) -> Request:
    made = Request(table.next_number(), 1, name, "r", PriorityClass.INTERACTIVE, "", 10, 100.0, **fields)  # type: ignore[arg-type]
    table.add(made)
    return made


def accept(table: RequestTable, slot: int, *columns: list[int], choices: list[int] | None = None) -> list[int]:
    """Columns: numbers, attempts, indexes, counts, ids."""
    return table.accept(slot, Emissions(1, 1, 1, *columns, [0] * len(columns[0]), [], choices or []))


@pytest.mark.parametrize(("state", "to"), list(itertools.product(RequestState, RequestState)))
def test_moves(state: RequestState, to: RequestState):
    if (state.value, to.value) in LEGAL:
        assert advance(state, to) is to
    else:
        with pytest.raises(ValueError, match="cannot go"):
            advance(state, to)


def test_the_table_names_every_state():
    assert set(TRANSITIONS) == set(RequestState)


def test_an_emission_of_the_current_attempt_and_index_is_taken():
    table = RequestTable(10)
    made = request(table)
    table.dispatch(made, 3)
    assert accept(table, 3, [made.number], [1], [0], [2], [5, 6]) == []
    assert accept(table, 3, [made.number], [1], [2], [1], [7]) == []
    assert (made.ids, made.state, table.num_tokens) == ([5, 6, 7], RequestState.STREAMING, 3)


@pytest.mark.parametrize(
    ("slot", "number", "attempt", "index"),
    [
        (2, 1, 1, 1),  # another slot
        (3, 9, 1, 1),  # an unknown request
        (3, 1, 0, 1),  # an older attempt
        (3, 1, 2, 1),  # an attempt that never was
        (3, 1, 1, 0),  # doubled
        (3, 1, 1, 2),  # a gap
    ],
)
def test_the_fence(slot: int, number: int, attempt: int, index: int):
    table = RequestTable(10)
    made = request(table)
    table.dispatch(made, 3)
    accept(table, 3, [1], [1], [0], [1], [5])
    assert accept(table, slot, [number], [attempt], [index], [1], [6]) == [0]
    assert made.ids == [5]
    assert table.num_stale == 1


def test_only_the_bad_positions_are_rejected():
    table = RequestTable(10)
    made = [request(table, name) for name in "abc"]
    for each in made:
        table.dispatch(each, 0)
    table.end(made[1], RequestState.CANCELLED)
    assert accept(table, 0, [1, 2, 3], [1, 1, 1], [0, 0, 0], [1, 2, 1], [1, 2, 2, 3]) == [1]
    assert [each.ids for each in made] == [[1], [], [3]]


def test_after_a_requeue_the_old_worker_is_not_heard():
    table = RequestTable(10)
    made = request(table)
    table.dispatch(made, 0)
    table.requeue(made)
    assert table.num_queued == 1
    table.dispatch(made, 1)
    assert accept(table, 0, [1], [1], [0], [1], [1]) == [0]
    assert accept(table, 1, [1], [1], [0], [1], [1]) == [0]
    assert accept(table, 1, [1], [made.attempt], [0], [1], [1]) == []


def test_an_end_is_final_and_counted_once():
    table = RequestTable(10)
    made = request(table)
    table.end(made, RequestState.EXPIRED)
    with pytest.raises(ValueError, match="cannot go"):
        table.end(made, RequestState.FINISHED)
    told = table.statistics()
    assert (told.num_open, told.num_queued, told.num_expired, told.num_finished) == (0, 0, 1, 0)


def test_the_table_is_bounded():
    table = RequestTable(1)
    request(table)
    with pytest.raises(EngineError) as caught:
        request(table, "b")
    assert caught.value.code is Code.OVERLOADED
    assert caught.value.retry_after_s > 0


def test_an_unknown_class_is_named():
    assert priority_class("batch") is PriorityClass.BATCH
    with pytest.raises(EngineError) as caught:
        priority_class("urgent")
    assert (caught.value.code, caught.value.field) == (Code.INVALID, "priority")


def test_each_choice_has_its_own_index():
    table = RequestTable(10)
    made = request(table, num_choices=3)
    table.dispatch(made, 0)
    number = made.number
    assert accept(table, 0, [number] * 3, [1] * 3, [0] * 3, [1, 2, 1], [5, 6, 7, 8], choices=[0, 1, 2]) == []
    assert accept(table, 0, [number] * 2, [1] * 2, [1, 1], [1, 1], [9, 9], choices=[2, 1]) == [1]
    assert accept(table, 0, [number], [1], [0], [1], [9], choices=[3]) == [0]
    assert (made.ids, made.other_ids, made.num_ids) == ([5], [[6, 7], [8, 9]], 5)
