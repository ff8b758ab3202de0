"""Owns the order in which queued requests of one route leave: class, then tenant, then deadline, then arrival.

Pure: requests and `now` in, a request out. Knows no replica beyond the question "does it fit". Called by the front
actor. FIFO is the case of one class, one tenant and no deadlines.

Class. A class competes by the arrival of its longest waiting request, lifted by `age_step_s` per class: the head with
the smallest (oldest arrival + class * age_step_s) goes first. So an interactive request passes batch work that came up
to one step before it, and batch work that has waited a step longer than that passes interactive work: nobody waits for
ever. With K slots freed per second and Q requests that came before it, a request of class c leaves within
c * age_step_s + (Q + 1) / K of the time it would take at the head.

Tenant. Inside a class the tenant with the smallest counter goes first; a pop charges it the request's cost. A tenant
that comes from idleness starts at virtual time (start-time fair queueing, Goyal et al. 1996): it saves nothing up.

What does not fit. A request that fits nowhere now is passed over by at most `scan_max` later ones; after that it holds
the queue until it fits, so that small requests cannot starve a large one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from msgspec import Struct

from engine.front.requests import PriorityClass, Request

GARBAGE_MIN: Final = 64

# A queue entry: deadline, arrival, number. The request itself is looked up, so that removal is lazy.
Entry = tuple[float, float, int]


class OrderStatistics(Struct, frozen=True):
    num_queued: int
    by_class: dict[str, int]
    num_tenants: int
    num_entries: int


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's queue inside one class."""

    name: str
    counter: float = 0.0
    is_in_heap: bool = False  # the class's heap has an entry with this counter
    entries: list[Entry] = field(default_factory=list)
    num_live: int = 0


@dataclass(slots=True, eq=False)
class _Search:
    """One `pop` under way: what did not fit so far, and whether one of those must not be passed again."""

    fits: Callable[[Request], bool]
    passed: list[tuple[_Tenant, Entry]] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Class:
    """One class: its tenants, those with work in a heap by counter, and arrivals oldest first for ageing."""

    tenants: dict[str, _Tenant] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_live: int = 0
    num_busy: int = 0  # tenants with something waiting
    virtual: float = 0.0  # virtual time: the largest counter that was at the head; never goes back


class Order:
    """The queue of one route, at most `queued_max` requests; what `Admission` lets in always fits."""

    __slots__ = ("_classes", "_live", "_passes", "age_step_s", "scan_max")

    def __init__(self, age_step_s: float, scan_max: int) -> None:
        self.age_step_s = age_step_s
        self.scan_max = scan_max
        self._classes = {each: _Class() for each in PriorityClass}
        self._live: dict[int, Request] = {}
        self._passes: dict[int, int] = {}  # number -> how often it was passed over because it did not fit

    def __len__(self) -> int:
        return len(self._live)

    def push(self, request: Request) -> None:
        """Queue a request under its own arrival time. Raises ValueError when it is queued already."""
        if request.number in self._live:
            raise ValueError(f"request {request.number} is queued already")
        self._live[request.number] = request
        group = self._classes[request.priority]
        group.num_live += 1
        heappush(group.arrivals, (request.arrived_at, request.number))
        tenant = group.tenants.get(request.tenant)
        if tenant is None:
            tenant = group.tenants[request.tenant] = _Tenant(request.tenant)
        if not tenant.num_live:
            if group.virtual > tenant.counter:
                tenant.counter, tenant.is_in_heap = group.virtual, False
            if not tenant.is_in_heap:
                tenant.is_in_heap = True
                heappush(group.heap, (tenant.counter, tenant.name))
            group.num_busy += 1
        tenant.num_live += 1
        heappush(tenant.entries, (request.deadline_at, request.arrived_at, request.number))

    @staticmethod
    def _first_tenant(group: _Class) -> _Tenant | None:
        """The tenant at the top of the heap; None when that entry was out of date, and then it is gone."""
        counter, name = group.heap[0]
        tenant = group.tenants.get(name)
        if tenant is not None and tenant.counter == counter:
            if tenant.num_live:
                return tenant
            tenant.is_in_heap = False
        heappop(group.heap)
        return None

    def remove(self, number: int) -> bool:
        """Take a request out; False when it is not queued. Its entries stay behind until they are met or swept."""
        request = self._live.get(number)
        if request is None:
            return False
        self._drop(request)
        self._sweep(self._classes[request.priority])
        return True

    def _drop(self, request: Request) -> None:
        """No longer queued. Stale entries are swept when they outnumber the live ones: O(1) on average."""
        live = self._live
        del live[request.number]
        self._passes.pop(request.number, None)
        group = self._classes[request.priority]
        group.num_live -= 1
        tenant = group.tenants[request.tenant]
        tenant.num_live -= 1
        if len(group.arrivals) > GARBAGE_MIN + 2 * group.num_live:
            group.arrivals = [each for each in group.arrivals if each[1] in live]
            heapify(group.arrivals)
        if len(tenant.entries) > GARBAGE_MIN + 2 * tenant.num_live:
            tenant.entries = [each for each in tenant.entries if each[2] in live]
            heapify(tenant.entries)
        group.num_busy -= not tenant.num_live

    @staticmethod
    def _sweep(group: _Class) -> None:
        """Keep the tenants that wait, and of the idle ones those that owe most: O(1) on average, memory bounded."""
        tenants = group.tenants
        if max(len(tenants), len(group.heap)) <= GARBAGE_MIN + 2 * group.num_busy:
            return
        idle = sorted((each for each in tenants.values() if not each.num_live), key=lambda each: each.counter)
        for each in idle[: len(idle) - GARBAGE_MIN // 2]:
            del tenants[each.name]
        for each in tenants.values():
            each.is_in_heap = each.num_live > 0
        group.heap = [(each.counter, each.name) for each in tenants.values() if each.is_in_heap]
        heapify(group.heap)

    def _ranked(self) -> list[_Class]:
        """Classes with work, best first."""
        ranked: list[tuple[float, int, _Class]] = []
        for priority, group in self._classes.items():
            arrivals = group.arrivals
            while arrivals and arrivals[0][1] not in self._live:
                heappop(arrivals)
            if arrivals:
                ranked.append((arrivals[0][0] + priority * self.age_step_s, priority, group))
        ranked.sort(key=lambda each: each[:2])
        return [group for _, _, group in ranked]

    def pop(self, fits: Callable[[Request], bool]) -> Request | None:
        """The best request that fits, charged to its tenant; None when none does. `fits` is asked in order.

        Only one that has been passed over fewer than `scan_max` times is passed over again. Changes the queue.
        """
        search = _Search(fits)
        chosen: Request | None = None
        for group in self._ranked():
            chosen = self._pop_class(group, search)
            if chosen is not None or search.is_over:
                break
        for tenant, entry in search.passed:
            heappush(tenant.entries, entry)
            if chosen is not None:
                self._passes[entry[2]] = self._passes.get(entry[2], 0) + 1
        if chosen is not None:
            self._sweep(self._classes[chosen.priority])
        return chosen

    def _pop_class(self, group: _Class, search: _Search) -> Request | None:
        """Tenants by counter, in each its heads, until one fits or one holds the queue."""
        set_aside: list[tuple[float, str]] = []
        chosen: Request | None = None
        while group.heap and chosen is None and not search.is_over:
            tenant = self._first_tenant(group)
            if tenant is None:
                continue
            chosen = self._pop_tenant(tenant, search)
            entry = heappop(group.heap)
            if chosen is None:
                set_aside.append(entry)
            else:
                self._charge(group, tenant, chosen)
        for entry in set_aside:
            heappush(group.heap, entry)
        return chosen

    def _pop_tenant(self, tenant: _Tenant, search: _Search) -> Request | None:
        entries = tenant.entries
        while entries and not search.is_over:
            entry = heappop(entries)
            request = self._live.get(entry[2])
            if request is None:
                continue
            if search.fits(request):
                self._drop(request)
                return request
            search.passed.append((tenant, entry))
            is_held = self._passes.get(request.number, 0) >= self.scan_max
            search.is_over = is_held or len(search.passed) >= self.scan_max
        return None

    @staticmethod
    def _charge(group: _Class, tenant: _Tenant, request: Request) -> None:
        """The tenant pays for what it got; its heap entry has been taken."""
        group.virtual = max(group.virtual, tenant.counter)
        tenant.counter += request.cost
        tenant.is_in_heap = tenant.num_live > 0
        if tenant.is_in_heap:
            heappush(group.heap, (tenant.counter, tenant.name))

    def first_arrival(self) -> float:
        """Arrival of the longest waiting request, infinity when none waits. Changes nothing that matters."""
        self._ranked()
        return min((group.arrivals[0][0] for group in self._classes.values() if group.arrivals), default=inf)

    def statistics(self) -> OrderStatistics:
        by_class = {priority.name.lower(): group.num_live for priority, group in self._classes.items()}
        tenants = [tenant for group in self._classes.values() for tenant in group.tenants.values()]
        num_entries = sum(len(tenant.entries) for tenant in tenants)
        return OrderStatistics(len(self._live), by_class, len(tenants), num_entries)
