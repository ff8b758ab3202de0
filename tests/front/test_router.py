"""Exact routing decisions; and in virtual time the faster of two replicas gets its larger share."""

from collections import Counter

import pytest

from engine.front.router import PLACES_MAX, ReplicaLoad, Router


def load(slot: int, outstanding: int = 0, free: int = 4, free_tokens: int = 10_000, seats: int = 4) -> ReplicaLoad:
    return ReplicaLoad(slot, seats, free, outstanding, free_tokens, is_idle=outstanding == 0)


@pytest.mark.parametrize(
    ("loads", "cost", "expected"),
    [
        ([], 10, None),
        ([load(0), load(1)], 10, 0),  # equals: the lowest slot
        ([load(1), load(0)], 10, 0),
        ([load(0, 100), load(1, 50)], 10, 1),  # less to do
        ([load(0, free=0), load(1, 500)], 10, 1),  # a seat comes before speed
        ([load(0, 50, free_tokens=5), load(1, 500)], 10, 1),  # room comes before speed
        ([load(0, 50, free_tokens=5)], 10, None),
        ([load(0, 0, free_tokens=5)], 10, 0),  # idle: the worker's own limit decides
    ],
)
def test_decisions_without_measurements(loads: list[ReplicaLoad], cost: int, expected: int | None):
    assert Router().choose(cost, loads) == expected


def test_decisions_between_a_slow_and_a_fast_replica():
    router = Router()
    router.observe(0, 1, busy_s=1.0, num_steps=100, num_tokens=100)
    router.observe(1, 1, busy_s=1.0, num_steps=300, num_tokens=300)
    chosen = []
    outstanding = [0, 0]
    for _ in range(8):
        slot = router.choose(60, [load(0, outstanding[0], seats=4), load(1, outstanding[1], seats=4)])
        chosen.append(slot)
        outstanding[slot] += 60
    # waits after each: slot 1 at 60/1200 … until 240/1200 > 60/400; a tie goes to the lower slot
    assert chosen == [1, 1, 0, 1, 1, 1, 0, 1]


def test_a_replica_with_little_work_does_not_look_slow():
    router = Router()
    router.observe(0, 1, busy_s=1.0, num_steps=100, num_tokens=6_400)
    router.observe(1, 1, busy_s=1.0, num_steps=100, num_tokens=100)
    assert router.choose(10, [load(0, 40), load(1, 30)]) == 1
    assert router.tokens_per_s(1) == 100


def test_an_unmeasured_replica_counts_as_the_mean_of_the_others():
    router = Router()
    router.observe(0, 1, 1.0, 100, 1)
    router.observe(1, 1, 1.0, 300, 1)
    loads = [load(0, 100), load(1, 250), load(2, 180)]
    assert router.choose(10, loads) == 1  # 260/300 < 190/200 < 110/100


def test_counters_of_a_new_epoch_start_over():
    router = Router()
    router.observe(0, 1, 10.0, 1000, 1000)
    router.observe(0, 2, 1.0, 100, 100)
    assert router.statistics().steps_per_s == {0: 100.0}
    router.observe(0, 2, 1.0, 100, 100)  # the same report again teaches nothing
    assert router.statistics().steps_per_s == {0: 100.0}
    router.forget(0)
    assert router.statistics().steps_per_s == {}


def test_the_fast_replica_gets_the_larger_share():
    """Late binding in virtual time: slot 1 ends three requests while slot 0 ends one."""
    router, served = Router(), Counter()
    router.observe(0, 1, 1.0, 100, 1)
    router.observe(1, 1, 1.0, 300, 1)
    running: list[tuple[float, int]] = []
    now = 0.0
    for _ in range(400):
        in_flight = Counter(slot for _, slot in running)
        loads = [load(slot, 60 * in_flight[slot], 4 - in_flight[slot]) for slot in (0, 1)]
        slot = router.choose(60, loads)
        if slot is None:
            now, ended = min(running)
            running.remove((now, ended))
            continue
        served[slot] += 1
        running.append((now + 60 / (100, 300)[slot], slot))
    assert 2.5 < served[1] / served[0] < 3.5


def test_a_conversation_goes_where_it_was_while_there_is_room():
    router = Router()
    router.remember("t/a", 1)
    assert router.choose(10, [load(0), load(1, 500)], conversation="t/a") == 1
    assert router.choose(10, [load(0), load(1, 500)], conversation="t/b") == 0
    assert router.choose(10, [load(0), load(1, 500)]) == 0
    assert router.choose(10, [load(0), load(1, 500, free=0)], conversation="t/a") == 0
    assert router.choose(10, [load(0), load(1, 500, free_tokens=5)], conversation="t/a") == 0
    assert router.choose(10, [load(0)], conversation="t/a") == 0  # its replica is gone
    router.remember("t/a", 0)
    assert router.choose(10, [load(0, 500), load(1)], conversation="t/a") == 0


def test_so_many_conversations_are_remembered():
    router = Router()
    for number in range(PLACES_MAX):
        router.remember(f"t/{number}", 1)
    router.remember("t/0", 1)  # used again
    router.remember("t/new", 1)
    loads = [load(0), load(1, 500)]
    assert [router.choose(1, loads, conversation=name) for name in ("t/0", "t/new", "t/1", "t/2")] == [1, 1, 0, 1]
