"""What queueing costs in the front: push + pop of the nested order, and taking emissions into the request table.

Ceiling: a bare heap of tuples of the same length for the order, a bare dict for the table. Both must stay flat: the
order from 10 to 100,000 queued requests.

    python perf/order.py [--quick]
"""

import random
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.front.order import Order
from engine.front.requests import PriorityClass, Request, RequestTable
from perf.report import alternate, finish, is_quick, table

NUM_OPERATIONS = 20_000


def any_fits(_: Request) -> bool:
    return True


def request(number: int, dice: random.Random) -> Request:
    deadline_at = number + dice.random() * 60 if dice.random() < 0.3 else inf
    priority, tenant = PriorityClass(dice.randrange(3)), f"t{dice.randrange(100)}"
    return Request(number, 1, str(number), "r", priority, tenant, 100, number * 0.001, deadline_at)


def order_at(num_queued: int, num_operations: int) -> dict[str, dict[str, float]]:
    dice = random.Random(1)
    order, heap = Order(5.0, 32), []
    for number in range(num_queued):
        order.push(request(number, dice))
        heappush(heap, (number * 0.001, inf, number))
    number = num_queued

    def nested() -> float:
        nonlocal number
        fresh = [request(number + index, dice) for index in range(num_operations)]
        number += num_operations
        started = time.perf_counter()
        for each in fresh:
            order.push(each)
            order.pop(any_fits)
        return (time.perf_counter() - started) / num_operations * 1e6

    def bare() -> float:
        started = time.perf_counter()
        for index in range(num_operations):
            heappush(heap, (number + index, inf, index))
            heappop(heap)
        return (time.perf_counter() - started) / num_operations * 1e6

    return alternate({"nested": nested, "bare": bare}, 3 if is_quick() else 5)


def accept_at(num_entries: int) -> dict[str, dict[str, float]]:
    dice = random.Random(1)
    requests = RequestTable(10_000)
    for _ in range(num_entries):
        made = request(requests.next_number(), dice)
        requests.add(made)
        requests.dispatch(made, 0)
    numbers, attempts = list(range(1, num_entries + 1)), [1] * num_entries
    num_frames = max(20, 20_000 // num_entries)
    known: dict[int, list[int]] = {number: [] for number in numbers}
    index = 0

    def timed(take: Callable[[list[int], list[int]], None]) -> float:
        nonlocal index
        frames = [([index + at] * num_entries, [7] * num_entries) for at in range(num_frames)]
        started = time.perf_counter()
        for indexes, ids in frames:
            take(indexes, ids)
        return (time.perf_counter() - started) / num_frames / num_entries * 1e6

    def fenced() -> float:
        nonlocal index
        spent = timed(lambda indexes, ids: requests.accept(0, numbers, attempts, indexes, attempts, ids) and None)
        index += num_frames
        return spent

    def bare_frame(_: list[int], ids: list[int]) -> None:
        for position, number in enumerate(numbers):
            known[number].append(ids[position])

    return alternate({"fenced": fenced, "bare": lambda: timed(bare_frame)}, 3 if is_quick() else 5)


def main() -> None:
    numbers: dict[str, dict[int, dict[str, float]]] = {"order": {}, "accept": {}}
    lines = []
    for num_queued in (10, 100, 1_000, 10_000, 100_000):
        result = order_at(num_queued, NUM_OPERATIONS // (4 if is_quick() else 1))
        numbers["order"][num_queued] = {name: round(value["median"], 3) for name, value in result.items()}
        nested, bare = result["nested"], result["bare"]
        lines.append(
            [
                num_queued,
                nested["median"],
                bare["median"],
                nested["median"] / bare["median"],
                f"{nested['low']:.3g}-{nested['high']:.3g}",
            ]
        )
    table(["queued", "push+pop us", "bare heap us", "x bare", "spread"], lines)
    lines = []
    for num_entries in (1, 16, 256):
        result = accept_at(num_entries)
        numbers["accept"][num_entries] = {name: round(value["median"], 4) for name, value in result.items()}
        lines.append(
            [
                num_entries,
                result["fenced"]["median"],
                result["bare"]["median"],
                result["fenced"]["median"] / result["bare"]["median"],
            ]
        )
    print()
    table(["entries per frame", "accept us/entry", "bare dict us/entry", "x bare"], lines)
    print("goal: push+pop <= 20 us, flat from 10 to 100,000")
    finish("order", numbers)


if __name__ == "__main__":
    main()
