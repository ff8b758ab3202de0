"""Exact orders; ageing; fairness; what does not fit; and a comparison with a slow reference."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.front.order import GARBAGE_MIN, Order
from engine.front.requests import PriorityClass, Request

REALTIME, INTERACTIVE, BATCH = PriorityClass


def request(
    number: int,
    arrived_at: float = 0.0,
    priority: PriorityClass = INTERACTIVE,
    tenant: str = "",
    deadline_at: float = math.inf,
    cost: int = 10,
) -> Request:
    return Request(number, 1, str(number), "r", priority, tenant, cost, arrived_at, deadline_at)


def any_fits(_: Request) -> bool:
    return True


def drained(order: Order) -> list[int]:
    numbers = []
    while (popped := order.pop(any_fits)) is not None:
        numbers.append(popped.number)
    return numbers


def filled(*requests: Request, age_step_s: float = 5.0, scan_max: int = 4) -> Order:
    order = Order(age_step_s, scan_max)
    for each in requests:
        order.push(each)
    return order


def test_one_class_one_tenant_no_deadline_is_first_in_first_out():
    assert drained(filled(*(request(number, number) for number in (3, 1, 2)))) == [1, 2, 3]


def test_classes_come_in_order():
    order = filled(request(1, 0, BATCH), request(2, 1, INTERACTIVE), request(3, 2, REALTIME))
    assert drained(order) == [3, 2, 1]


def test_inside_a_tenant_the_earliest_deadline_goes_first():
    order = filled(request(1, 0), request(2, 1, deadline_at=50), request(3, 2, deadline_at=40))
    assert drained(order) == [3, 2, 1]


def test_batch_work_that_waited_a_step_longer_goes_first():
    """vllm-project/vllm#51574: low priority was never admitted under steady traffic."""
    order = filled(request(1, 0, BATCH), request(2, 4.9, INTERACTIVE), age_step_s=5)
    assert drained(order) == [2, 1]
    order = filled(request(1, 0, BATCH), request(2, 5.1, INTERACTIVE), age_step_s=5)
    assert drained(order) == [1, 2]


def test_low_starts_within_the_ageing_bound_under_steady_high_traffic():
    """30 s of high traffic that fills all capacity, and one low request: it leaves within class * age_step_s + 1."""
    order, low, left_at = Order(5.0, 4), request(10_000, 3.0, BATCH), math.inf
    order.push(low)
    for tick in range(300):
        now = tick / 10
        order.push(request(2 * tick, now, REALTIME))
        order.push(request(2 * tick + 1, now, REALTIME))
        for _ in range(2):
            popped = order.pop(any_fits)
            if popped is low:
                left_at = now
    assert 12.9 <= left_at <= 3.0 + 2 * 5.0 + 1.0


def test_tenants_share_by_cost_not_by_number_of_requests():
    order = Order(5.0, 4)
    for number in range(60):
        order.push(request(number, number, tenant="big", cost=30))
        order.push(request(100 + number, number, tenant="small", cost=10))
    first = [order.pop(any_fits).tenant for _ in range(40)]
    assert Counter(first) == {"small": 30, "big": 10}


def test_a_tenant_saves_nothing_up_while_idle_and_pays_nothing_for_being_alone():
    order = Order(5.0, 4)
    for number in range(50):
        order.push(request(number, number, tenant="a"))
        assert order.pop(any_fits).tenant == "a"
    for number in range(10):
        order.push(request(100 + number, 100, tenant="a"))
        order.push(request(200 + number, 100, tenant="b"))
    first = Counter(order.pop(any_fits).tenant for _ in range(10))
    assert abs(first["a"] - first["b"]) <= 2


def test_what_does_not_fit_is_passed_but_not_for_ever():
    order = Order(5.0, scan_max=3)
    order.push(request(1, 0, cost=1000))
    for number in range(2, 9):
        order.push(request(number, number))

    def small_fits(each: Request) -> bool:
        return each.cost < 100

    popped = [order.pop(small_fits) for _ in range(5)]
    assert [each.number if each else None for each in popped] == [2, 3, 4, None, None]
    assert order.pop(any_fits).number == 1
    assert order.pop(small_fits).number == 5


def test_who_holds_the_queue_holds_it_for_other_tenants_and_classes_too():
    order = Order(5.0, scan_max=1)
    order.push(request(1, 0, cost=1000))
    order.push(request(2, 1, tenant="b"))
    order.push(request(3, 2, BATCH))
    assert order.pop(lambda each: each.cost < 100) is None
    assert len(order) == 3
    assert drained(order) == [1, 2, 3]


def test_removal_leaves_bounded_garbage():
    order = Order(5.0, 4)
    order.push(request(0, 0, deadline_at=1e9))
    for number in range(1, 5000):
        order.push(request(number, number, tenant=f"t{number}"))
        assert order.remove(number)
    told = order.statistics()
    assert told.num_queued == 1
    assert told.num_tenants <= 2 * GARBAGE_MIN
    assert told.num_entries <= 4 * GARBAGE_MIN
    assert not order.remove(77)
    assert drained(order) == [0]


def test_tenants_that_came_once_are_forgotten():
    order = Order(5.0, 4)
    for number in range(5000):
        order.push(request(number, number, tenant=f"t{number}"))
        assert order.pop(any_fits).number == number
    assert order.statistics().num_tenants <= 2 * GARBAGE_MIN


def test_the_same_request_is_not_queued_twice():
    order = filled(request(1))
    with pytest.raises(ValueError, match="already"):
        order.push(request(1))


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from(PriorityClass),
            st.sampled_from("ab"),
            st.sampled_from([math.inf, 5.0, 9.0]),
        ),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 60)),
    ),
    max_size=80,
)


class Reference:
    """The same rule by sorting everything at every pop."""

    def __init__(self, age_step_s: float) -> None:
        self.age_step_s = age_step_s
        self.waiting: dict[int, Request] = {}
        self.counters: dict[tuple[int, str], float] = {}
        self.virtual: dict[int, float] = dict.fromkeys(PriorityClass, 0.0)

    def push(self, each: Request) -> None:
        key = (each.priority, each.tenant)
        if not any((other.priority, other.tenant) == key for other in self.waiting.values()):
            self.counters[key] = max(self.counters.get(key, 0.0), self.virtual[each.priority])
        self.waiting[each.number] = each

    def pop(self) -> int | None:
        if not self.waiting:
            return None
        oldest = {
            priority: min(each.arrived_at for each in self.waiting.values() if each.priority is priority)
            for priority in {each.priority for each in self.waiting.values()}
        }
        best = min(oldest, key=lambda priority: (oldest[priority] + priority * self.age_step_s, priority))
        group = [each for each in self.waiting.values() if each.priority is best]
        tenant = min({each.tenant for each in group}, key=lambda name: (self.counters[best, name], name))
        chosen = min(
            (each for each in group if each.tenant == tenant),
            key=lambda each: (each.deadline_at, each.arrived_at, each.number),
        )
        self.virtual[best] = max(self.virtual[best], self.counters[best, tenant])
        self.counters[best, tenant] += chosen.cost
        return self.waiting.pop(chosen.number).number


@settings(max_examples=200)
@given(operations)
def test_it_agrees_with_sorting_everything(given_operations: list[tuple]):
    order, reference = Order(3.0, 4), Reference(3.0)
    for now, operation in enumerate(given_operations):
        if operation[0] == "push":
            _, priority, tenant, deadline = operation
            each = request(now, now, priority, tenant, deadline, cost=1 + now % 4)
            order.push(each)
            reference.push(each)
        elif operation[0] == "pop":
            popped = order.pop(any_fits)
            assert (popped.number if popped else None) == reference.pop()
        else:
            assert order.remove(operation[1]) == (reference.waiting.pop(operation[1], None) is not None)
        assert len(order) == len(reference.waiting)
    rest = drained(order)
    assert len(rest) == len(set(rest)) == len(reference.waiting)
