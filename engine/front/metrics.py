"""Owns what is measured of requests and replicas, and its rendering in Prometheus' text format.

Knows no socket. Called by the front actor. Workers and gateways send what they counted since they last said so; a
series of a replica exists while its current worker does, so that nothing of the dead is shown. Labels are bounded:
routes of the configuration, slots, states, codes. The names `vllm:*` are those that existing dashboards look for.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.front.replicas import ReplicaView
from engine.front.requests import Request
from ipc.messages import GAP_BOUNDS, Counts, Ending, Report, StatusReport

WAIT_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
HTTP_SERIES_MAX: Final = 256
ENGINE_LABEL: Final = "0"


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound, the last without one, and the sum of all values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """What somebody else counted by the same bounds."""
        self.counts = [known + more for known, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


def _waits() -> Histogram:
    return Histogram(WAIT_BOUNDS)


@dataclass(slots=True)
class _Route:
    """What one route has shown since the front started."""

    queue: Histogram = field(default_factory=_waits)
    prefill: Histogram = field(default_factory=_waits)
    decode: Histogram = field(default_factory=_waits)
    first: Histogram = field(default_factory=_waits)
    whole: Histogram = field(default_factory=_waits)
    gap: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    ends: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    num_arrivals: int = 0
    num_open: int = 0
    open_area: float = 0.0  # of the number open over time, for its mean
    changed_at: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0

    def change(self, by: int, now: float) -> None:
        self.open_area += self.num_open * (now - self.changed_at)
        self.num_open += by
        self.changed_at = now


class Metrics:
    """One registry: everything that `/metrics` tells."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._routes: dict[str, _Route] = {}
        self._http: dict[tuple[str, str], int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._families: list[Metric] = []

    def _route(self, route: str) -> _Route:
        known = self._routes.get(route)
        if known is None:
            known = self._routes[route] = _Route(changed_at=self._started_at)
        return known

    def observe_arrival(self, route: str, now: float) -> None:
        """A request was accepted."""
        known = self._route(route)
        known.num_arrivals += 1
        known.change(1, now)

    def observe_refusal(self, route: str, code: str) -> None:
        """A request was not accepted; "" stands for a route that does not exist."""
        refusals = self._route(route).refusals
        refusals[code] = refusals.get(code, 0) + 1

    def observe_dispatch(self, request: Request, now: float) -> None:
        """A worker has it."""
        if not request.dispatched_at:
            self._route(request.route).queue.observe(now - request.arrived_at)
        request.dispatched_at = now

    def observe_started(self, requests: Iterable[Request], now: float) -> None:
        """Their first tokens came."""
        for request in requests:
            if not request.started_at:
                request.started_at = now
                route = self._route(request.route)
                route.first.observe(now - request.arrived_at)
                route.prefill.observe(now - request.dispatched_at)

    def observe_usage(self, request: Request, ending: Ending) -> None:
        """It finished: what its prompt was."""
        route = self._route(request.route)
        route.prompt_tokens += ending.num_prompt_tokens
        route.cached_tokens += ending.num_cached_tokens

    def observe_end(self, request: Request, reason: str, now: float) -> None:
        """It is over: stop, length, or what else it ended by."""
        route = self._route(request.route)
        route.change(-1, now)
        route.ends[reason] = route.ends.get(reason, 0) + 1
        route.whole.observe(now - request.arrived_at)
        route.generation_tokens += request.num_ids
        if request.started_at:
            route.decode.observe(now - request.started_at)

    def observe_report(self, route: str, told: Report) -> None:
        """What a worker counted since its last report."""
        if len(told.gaps) == len(GAP_BOUNDS) + 1:
            self._route(route).gap.add(told.gaps, told.gaps_s)

    def count_http(self, counts: Counts) -> None:
        """What a gateway answered since it last said so."""
        for name, count in counts.requests.items():
            path, _, status = name.rpartition(" ")
            if (path, status) in self._http or len(self._http) < HTTP_SERIES_MAX:
                self._http[path, status] = self._http.get((path, status), 0) + count

    # Rendering.

    def collect(self) -> list[Metric]:
        """For the registry: what `render` made."""
        return self._families

    def render(self, status: StatusReport, views: dict[int, ReplicaView], queued: dict[str, int], now: float) -> bytes:
        """All of it as text. A few milliseconds; changes no counter."""
        self._families = [
            *self._of_routes(queued, now),
            *self._of_replicas(status, views, now),
            *self._of_front(status),
        ]
        return generate_latest(self._registry)

    def _of_routes(self, queued: dict[str, int], now: float) -> list[Metric]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests that a worker has.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait in the front.", labels=labels)
        prompt = CounterMetricFamily("vllm:prompt_tokens", "Tokens of finished requests' prompts.", labels=labels)
        made = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=labels)
        cached = CounterMetricFamily(
            "engine_cached_prompt_tokens", "Prompt tokens found in the cache.", labels=["route"]
        )
        ends = CounterMetricFamily("vllm:request_success", "Requests by end.", labels=[*labels, "finished_reason"])
        ended = CounterMetricFamily("engine_requests", "Requests by how they ended.", labels=["route", "outcome"])
        refused = CounterMetricFamily("engine_refused", "Requests refused at once.", labels=["route", "code"])
        rate = GaugeMetricFamily(
            "engine_success_ratio",
            "Requests that finished, of all that were not cancelled and not wrong.",
            labels=["route"],
        )
        little = GaugeMetricFamily(
            "engine_little_ratio",
            "Requests open on average / (arrival rate x time in the system): 1.",
            labels=["route"],
        )
        histograms = {
            "vllm:time_to_first_token_seconds": ("first", "From arrival to the first token."),
            "vllm:inter_token_latency_seconds": ("gap", "Between the tokens of a sequence, at its worker."),
            "vllm:e2e_request_latency_seconds": ("whole", "From arrival to the end."),
            "vllm:request_queue_time_seconds": ("queue", "From arrival to a worker."),
            "vllm:request_prefill_time_seconds": ("prefill", "From a worker to the first token."),
            "vllm:request_decode_time_seconds": ("decode", "From the first token to the end."),
        }
        families = {name: HistogramMetricFamily(name, text, labels=labels) for name, (_, text) in histograms.items()}
        for name in sorted(queued):
            route, key = self._route(name), [name, ENGINE_LABEL]
            running.add_metric(key, max(0, route.num_open - queued[name]))
            waiting.add_metric(key, queued[name])
            prompt.add_metric(key, route.prompt_tokens)
            made.add_metric(key, route.generation_tokens)
            cached.add_metric([name], route.cached_tokens)
            for reason, count in sorted(route.ends.items()):
                if reason in {"stop", "length"}:
                    ends.add_metric([*key, reason], count)
                ended.add_metric([name, reason], count)
            num_good = route.ends.get("stop", 0) + route.ends.get("length", 0) + route.ends.get("finished", 0)
            num_all = sum(route.ends.values()) - route.ends.get("cancelled", 0) - route.ends.get("refused", 0)
            if num_all:
                rate.add_metric([name], num_good / num_all)
            ratio = _little(route, now - self._started_at, now)
            if ratio is not None:
                little.add_metric([name], ratio)
            for family, (attribute, _) in histograms.items():
                histogram: Histogram = getattr(route, attribute)
                families[family].add_metric(key, histogram.buckets(), histogram.total)
        for name, route in sorted(self._routes.items()):
            for code, count in sorted(route.refusals.items()):
                refused.add_metric([name, code], count)
        return [running, waiting, prompt, made, cached, ends, ended, refused, rate, little, *families.values()]

    def _of_replicas(self, status: StatusReport, views: dict[int, ReplicaView], now: float) -> list[Metric]:
        labels = ["slot", "route"]
        ready = GaugeMetricFamily("engine_replica_ready", "1 while it serves.", labels=labels)
        restarts = CounterMetricFamily("engine_worker_restarts", "Workers that died.", labels=labels)
        epoch = GaugeMetricFamily("engine_epoch", "Worker processes started in this slot.", labels=labels)
        seats = GaugeMetricFamily("engine_running_sequences", "Sequences that it runs.", labels=labels)
        cache = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Blocks in use, 0 to 1.", labels=["model_name", "engine"])
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preemptions.", labels=["model_name", "engine"])
        busy = GaugeMetricFamily(
            "engine_device_busy_ratio", "Time with a step on the device, of all time.", labels=labels
        )
        memory = GaugeMetricFamily("engine_kv_memory_ratio", "KV blocks in use or cached, of all.", labels=labels)
        useful = GaugeMetricFamily(
            "engine_useful_ratio", "Tokens computed for the first time, of all that the device computed.", labels=labels
        )
        broken = CounterMetricFamily("engine_non_finite_rows", "Rows whose logits were not finite.", labels=labels)
        for replica in status.replicas:
            key = [str(replica.slot), replica.route]
            ready.add_metric(key, float(replica.state == "ready"))
            restarts.add_metric(key, replica.num_deaths)
            epoch.add_metric(key, replica.epoch)
            view = views.get(replica.slot)
            report = view.report if view is not None else None
            if view is None or report is None or view.ready is None:
                continue
            seats.add_metric(key, report.num_running)
            num_blocks = max(1, view.ready.num_blocks)
            used = num_blocks - report.num_free_blocks
            cache.add_metric([replica.route, str(replica.slot)], used / num_blocks)
            preempted.add_metric([replica.route, str(replica.slot)], report.num_preemptions)
            memory.add_metric(key, min(1.0, (used + report.num_cached_blocks) / num_blocks))
            broken.add_metric(key, report.num_non_finite)
            if view.admitted_at:
                busy.add_metric(key, min(1.0, report.busy_s / max(1e-9, now - view.admitted_at)))
            if report.num_computed_tokens:
                useful.add_metric(key, 1 - report.num_recomputed_tokens / report.num_computed_tokens)
        return [ready, restarts, epoch, seats, cache, preempted, busy, memory, useful, broken]

    def _of_front(self, status: StatusReport) -> list[Metric]:
        counted = status.counters
        totals = (
            ("engine_fenced_entries", "Results of workers that came too late.", counted.stale_entries),
            ("engine_protocol_errors", "Messages that broke the wire specification.", counted.protocol_errors),
            ("engine_slow_readers", "Sessions ended because they did not read.", counted.slow_readers),
            ("engine_lost_peers", "Sessions whose client went away.", counted.lost_peers),
            ("engine_internal_errors", "Faults of the engine.", counted.internal_errors),
        )
        levels = (
            ("engine_sessions", "Open sessions.", counted.num_sessions),
            ("engine_open_requests", "Open requests.", counted.num_open),
            ("engine_outbox_bytes", "Bytes kept for clients that do not read.", counted.outbox_bytes),
            ("engine_journal_tokens", "Tokens of open requests kept in the front.", counted.journal_tokens),
            ("engine_uptime_seconds", "Since the front started.", status.uptime_s),
        )
        families: list[Metric] = [CounterMetricFamily(name, text, value=value) for name, text, value in totals]
        families += [GaugeMetricFamily(name, text, value=value) for name, text, value in levels]
        state = GaugeMetricFamily("engine_state", "1 for the state that the engine is in.", labels=["state"])
        for name in ("starting", "ready", "degraded", "failed", "draining"):
            state.add_metric([name], float(status.state == name))
        http = CounterMetricFamily("engine_http_requests", "HTTP requests answered.", labels=["path", "status"])
        for (path, code), count in sorted(self._http.items()):
            http.add_metric([path, code], count)
        return [*families, state, http]


def _little(route: _Route, elapsed_s: float, now: float) -> float | None:
    """L / (lambda W) of ended requests and those open; None before anything has ended. It differs from 1 by what is
    still open, and by nothing else when the measurements are right."""
    num_ended = sum(route.ends.values())
    if not num_ended or elapsed_s <= 0:
        return None
    area = route.open_area + route.num_open * (now - route.changed_at)
    spent = route.whole.total
    return area / spent if spent else None
