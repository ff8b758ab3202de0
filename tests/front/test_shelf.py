"""What is kept, for whom, for how long, and what makes room for what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.front.shelf import OVERHEAD_BYTES, Item, Shelf
from ipc.errors import Code, EngineError


def item(number: int, name: str = "", tenant: str = "", note: bytes = b"", until: float = 10.0) -> Item:
    return Item(name or f"r{number}", tenant, number, note, 0.0, until)


def test_kept_for_its_tenant_alone():
    shelf = Shelf(10, 100_000)
    shelf.put(item(1, "a", "t", b"note"), 0.0)
    shelf.append(1, b"one")
    shelf.append(2, b"of another request")
    assert shelf.find("a", "t").events == [b"one"]
    for name, tenant in (("a", ""), ("a", "u"), ("b", "t")):
        with pytest.raises(EngineError) as caught:
            shelf.find(name, tenant)
        assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(EngineError) as caught:
        shelf.put(item(2, "a", "t"), 0.0)
    assert caught.value.code is Code.DUPLICATE
    shelf.put(item(2, "a", "u"), 0.0)


def test_it_goes_when_its_time_is_over_and_it_has_ended():
    shelf = Shelf(10, 100_000)
    shelf.put(item(1, until=5.0), 0.0)
    shelf.put(item(2, until=5.0), 0.0)
    shelf.end(1, "finished")
    shelf.expire(4.9)
    assert len(shelf) == 2
    shelf.expire(5.0)
    assert [each.number for each in shelf] == [2]
    shelf.end(2, "failed")
    shelf.expire(5.0)
    assert (len(shelf), shelf.num_bytes, shelf.is_open) == (0, 0, False)


def test_the_oldest_that_has_ended_makes_room():
    shelf = Shelf(2, 100_000)
    shelf.put(item(1), 0.0)
    shelf.put(item(2), 0.0)
    with pytest.raises(EngineError) as caught:
        shelf.put(item(3), 0.0)
    assert (caught.value.code, caught.value.field) == (Code.OVERLOADED, "keep_s")
    shelf.end(2, "finished")
    shelf.put(item(3), 0.0)
    assert [each.number for each in shelf] == [1, 3]


def test_what_grows_without_room_is_given_up():
    shelf = Shelf(10, 3 * OVERHEAD_BYTES)
    shelf.put(item(1), 0.0)
    shelf.put(item(2), 0.0)
    shelf.end(2, "finished")
    shelf.append(1, bytes(OVERHEAD_BYTES))
    assert [each.number for each in shelf] == [1, 2]
    shelf.append(1, bytes(OVERHEAD_BYTES))
    assert [each.number for each in shelf] == [1]
    assert not shelf.append(1, bytes(2 * OVERHEAD_BYTES))
    assert (len(shelf), shelf.num_bytes) == (0, 0)
    assert shelf.append(1, b"it is not kept any more")
    with pytest.raises(EngineError):
        shelf.put(item(3, note=bytes(4 * OVERHEAD_BYTES)), 0.0)


@given(st.lists(st.tuples(st.sampled_from("paefx"), st.integers(1, 5), st.integers(0, 900)), max_size=60))
def test_the_bounds_hold_and_the_books_balance(steps: list[tuple[str, int, int]]):
    shelf = Shelf(3, 3000)
    for now, (action, number, size) in enumerate(steps):
        try:
            if action == "p":
                shelf.put(item(number, note=bytes(size), until=now + 5.0), float(now))
            elif action == "a":
                shelf.append(number, bytes(size))
            elif action == "e":
                shelf.end(number, "finished")
            elif action == "f":
                shelf.forget(f"r{number}", "")
            else:
                shelf.expire(float(now))
        except EngineError:
            pass
        sizes = [OVERHEAD_BYTES + len(each.note) + sum(map(len, each.events)) for each in shelf]
        assert sum(sizes) == shelf.num_bytes <= 3000
        assert len(shelf) <= 3
        assert shelf.is_open == any(not each.state for each in shelf)
