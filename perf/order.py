"""What queueing costs in the front: push + pop of the nested order, and taking emissions into the request table.

Ceiling: a bare heap of tuples for the order, in which a pop costs log2 of the length in comparisons and, once the heap
outgrows the caches, in misses; a bare dict of lists for the table. The order keeps three heaps per request (arrivals,
tenants, entries) and takes out lazily, so beside the mean of push + pop stands the slowest single pair: when garbage
outnumbers what is live, one pop sweeps it all, and the front does nothing else meanwhile.

Three classes, 100 tenants, 30% with a deadline; pushed and popped in pairs at a constant length.

    python perf/order.py [--quick]
"""

import itertools
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
from engine.memory import quiet_gc
from ipc.messages import Emissions
from perf.report import Spread, alternate, alternate_parts, between, finish, is_quick, table

GOAL_US = 20


def any_fits(_: Request) -> bool:
    return True


def request(number: int, dice: random.Random) -> Request:
    deadline_at = number + dice.random() * 60 if dice.random() < 0.3 else inf
    priority, tenant = PriorityClass(dice.randrange(3)), f"t{dice.randrange(100)}"
    return Request(number, 1, str(number), "r", priority, tenant, 100, number * 0.001, deadline_at)


def order_at(num_queued: int, num_operations: int) -> dict[str, dict[str, Spread]]:
    dice = random.Random(1)
    order, heap = Order(5.0, 32), []
    for number in range(num_queued):
        order.push(request(number, dice))
        heappush(heap, (number * 0.001, inf, number))
    next_number = itertools.count(num_queued)
    clock = time.perf_counter

    def nested() -> dict[str, float]:
        fresh = [request(next(next_number), dice) for _ in range(num_operations)]
        slowest = 0.0
        started = before = clock()
        for each in fresh:
            order.push(each)
            order.pop(any_fits)
            now = clock()
            slowest = max(slowest, now - before)
            before = now
        return {"us": (before - started) / num_operations * 1e6, "slowest_us": slowest * 1e6}

    def bare() -> dict[str, float]:
        fresh = [(next(next_number) * 0.001, inf, index) for index in range(num_operations)]
        started = clock()
        for each in fresh:
            heappush(heap, each)
            heappop(heap)
        return {"us": (clock() - started) / num_operations * 1e6}

    return alternate_parts({"nested": nested, "bare": bare}, 3 if is_quick() else 5)


def accept_at(num_entries: int) -> dict[str, dict[str, float]]:
    dice = random.Random(1)
    requests = RequestTable(10_000)
    for _ in range(num_entries):
        made = request(requests.next_number(), dice)
        requests.add(made)
        requests.dispatch(made, 0)
    numbers, attempts = list(range(1, num_entries + 1)), [1] * num_entries
    num_frames = max(20, 40_000 // num_entries)
    known: dict[int, list[int]] = {number: [] for number in numbers}
    index = 0

    def timed(take: Callable[[list[int], list[int]], None]) -> float:
        nonlocal index
        frames = [([index + at] * num_entries, [7] * num_entries) for at in range(num_frames)]
        started = time.perf_counter()
        for indexes, ids in frames:
            take(indexes, ids)
        return (time.perf_counter() - started) / num_frames / num_entries * 1e6

    def emissions(indexes: list[int], ids: list[int]) -> Emissions:
        return Emissions(1, 1, 1, numbers, attempts, indexes, attempts, ids, [])

    def fenced() -> float:
        nonlocal index
        spent = timed(lambda indexes, ids: requests.accept(0, emissions(indexes, ids)) and None)
        index += num_frames
        return spent

    def bare_frame(_: list[int], ids: list[int]) -> None:
        for position, number in enumerate(numbers):
            known[number].append(ids[position])

    return alternate({"fenced": fenced, "bare": lambda: timed(bare_frame)}, 3 if is_quick() else 7)


def main() -> None:
    quiet_gc()  # as the engine does
    orders: dict[int, dict[str, dict[str, Spread]]] = {}
    lines: list[list[object]] = []
    for num_queued in (10, 100, 1_000, 10_000, 100_000):
        num_operations = 5_000 if is_quick() else max(20_000, num_queued)  # long enough for the sweeps to count
        orders[num_queued] = result = order_at(num_queued, num_operations)
        nested, bare = result["nested"]["us"], result["bare"]["us"]
        ratio, slowest = nested["median"] / bare["median"], result["nested"]["slowest_us"]["median"]
        lines.append([num_queued, nested["median"], bare["median"], ratio, between(nested), slowest])
    table(["queued", "push+pop us", "bare heap us", "x bare", "spread", "slowest pair us"], lines)
    tables: dict[int, dict[str, Spread]] = {}
    lines = []
    for num_entries in (1, 16, 256):
        tables[num_entries] = each = accept_at(num_entries)
        fenced, plain = each["fenced"], each["bare"]
        ratio = fenced["median"] / plain["median"]
        lines.append([num_entries, fenced["median"], plain["median"], ratio, between(fenced)])
    print()
    table(["entries per frame", "accept us/entry", "bare dict us/entry", "x bare", "spread"], lines)
    medians = [each["nested"]["us"]["median"] for each in orders.values()]
    print(f"goal: push+pop <= {GOAL_US} us, flat from 10 to 100,000: {min(medians):.1f} to {max(medians):.1f} us")
    finish("order", {"order": orders, "accept_us_per_entry": tables})


if __name__ == "__main__":
    main()
