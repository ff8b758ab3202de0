"""What is counted, exactly, and that nothing of the dead is shown."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.front.metrics import HTTP_SERIES_MAX, WAIT_BOUNDS, Histogram, Metrics
from engine.front.replicas import ReplicaView
from engine.front.requests import PriorityClass, Request
from ipc.messages import GAP_BOUNDS, Counters, Counts, Ending, ReplicaReport, Report, StatusReport, WorkerReady

ROUTE = {"model_name": "r", "engine": "0"}


def request(number: int = 1, arrived_at: float = 100.0) -> Request:
    return Request(number, 1, "a", "r", PriorityClass.INTERACTIVE, "", 10, arrived_at)


def status(*replicas: ReplicaReport) -> StatusReport:
    return StatusReport("0", "ready", 1, 1.0, "", [], list(replicas), Counters())


def samples(
    metrics: Metrics,
    now: float = 110.0,
    views: dict[int, ReplicaView] | None = None,
    report: StatusReport | None = None,
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render(report or status(), views or {}, {"r": 0}, now).decode()
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for one in families for each in one.samples}


def of(found: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float | None:
    return found.get((name, tuple(sorted(labels.items()))))


def test_a_histogram_counts_by_upper_bound():
    made = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        made.observe(value)
    made.add([1, 0, 0], 0.5)
    assert made.buckets() == [("1.0", 3), ("2.0", 5), ("+Inf", 6)]
    assert made.total == 8.5
    assert list(WAIT_BOUNDS) == sorted(WAIT_BOUNDS)


def test_the_times_of_a_request():
    metrics, one = Metrics(100.0), request()
    metrics.observe_arrival("r", 100.0)
    metrics.observe_dispatch(one, 100.5)
    metrics.observe_dispatch(one, 101.0)  # again, after its worker could not take it: the wait was counted
    metrics.observe_started([one], 102.0)
    metrics.observe_started([one], 103.0)
    metrics.observe_usage(one, Ending(0, 0, 7, 3))
    one.ids += [5, 6]
    metrics.observe_end(one, "stop", 104.0)
    found = samples(metrics)
    sums = {
        "request_queue_time": 0.5,
        "request_prefill_time": 1.0,
        "time_to_first_token": 2.0,
        "request_decode_time": 2.0,
        "e2e_request_latency": 4.0,
    }
    for name, expected in sums.items():
        assert of(found, f"vllm:{name}_seconds_sum", **ROUTE) == expected, name
        assert of(found, f"vllm:{name}_seconds_count", **ROUTE) == 1
    assert of(found, "vllm:prompt_tokens_total", **ROUTE) == 7
    assert of(found, "vllm:generation_tokens_total", **ROUTE) == 2
    assert of(found, "engine_cached_prompt_tokens_total", route="r") == 3
    assert of(found, "vllm:request_success_total", **ROUTE, finished_reason="stop") == 1
    assert of(found, "engine_success_ratio", route="r") == 1.0
    assert of(found, "vllm:num_requests_running", **ROUTE) == 0


def test_ends_add_up_and_a_cancel_is_no_failure():
    metrics = Metrics(100.0)
    for number, reason in enumerate(["stop", "length", "cancelled", "cancelled", "failed", "refused"]):
        metrics.observe_arrival("r", 100.0)
        metrics.observe_end(request(number), reason, 101.0)
    metrics.observe_refusal("r", "overloaded")
    metrics.observe_refusal("", "not_found")
    found = samples(metrics)
    ended = {key[1][0][1]: value for key, value in found.items() if key[0] == "engine_requests_total"}
    assert ended == {"stop": 1, "length": 1, "cancelled": 2, "failed": 1, "refused": 1}
    assert of(found, "engine_success_ratio", route="r") == pytest.approx(2 / 3)
    assert of(found, "engine_refused_total", route="", code="not_found") == 1


@pytest.mark.parametrize("num_open", [0, 3])
def test_littles_law_holds_of_what_is_measured(num_open: int):
    metrics = Metrics(100.0)
    for number in range(5):
        metrics.observe_arrival("r", 100.0 + number)
        metrics.observe_end(request(number, 100.0 + number), "stop", 102.5 + number)
    assert of(samples(metrics, 107.0), "engine_little_ratio", route="r") == pytest.approx(1.0)
    for _ in range(num_open):
        metrics.observe_arrival("r", 107.0)
    assert of(samples(metrics, 108.0), "engine_little_ratio", route="r") == pytest.approx(1.0 + num_open / 12.5)


def test_a_replica_is_shown_while_its_worker_lives():
    metrics = Metrics(100.0)
    view = ReplicaView(0, 2, "r", "token")
    view.ready = WorkerReady(2, 8, 100, 16, 2048)
    view.admitted_at = 100.0
    view.report = Report(2, 9, 5.0, 50, 3, 0, 60, 20, 4, 0, num_computed_tokens=100, num_recomputed_tokens=25)
    alive = samples(metrics, 110.0, {0: view}, status(ReplicaReport(0, "r", "ready", 2, num_deaths=1)))
    key = {"slot": "0", "route": "r"}
    assert of(alive, "engine_device_busy_ratio", **key) == 0.5
    assert of(alive, "engine_kv_memory_ratio", **key) == pytest.approx(0.6)
    assert of(alive, "engine_useful_ratio", **key) == 0.75
    assert of(alive, "vllm:kv_cache_usage_perc", model_name="r", engine="0") == pytest.approx(0.4)
    assert of(alive, "engine_worker_restarts_total", **key) == 1
    dead = samples(metrics, 111.0, {}, status(ReplicaReport(0, "r", "backoff", 2, num_deaths=2)))
    assert of(dead, "engine_replica_ready", **key) == 0
    assert of(dead, "engine_worker_restarts_total", **key) == 2
    for name in ("engine_running_sequences", "engine_device_busy_ratio", "engine_useful_ratio"):
        assert of(dead, name, **key) is None


def test_gaps_of_workers_are_deltas():
    metrics = Metrics(100.0)
    gaps = [0] * (len(GAP_BOUNDS) + 1)
    gaps[2] = 4
    for _ in range(2):
        metrics.observe_report("r", Report(1, 1, 0.0, 0, 0, 0, 0, 0, 0, 0, gaps=gaps, gaps_s=0.02))
    metrics.observe_report("r", Report(1, 1, 0.0, 0, 0, 0, 0, 0, 0, 0, gaps=[1, 2], gaps_s=9.0))  # of another version
    found = samples(metrics)
    assert of(found, "vllm:inter_token_latency_seconds_count", **ROUTE) == 8
    assert of(found, "vllm:inter_token_latency_seconds_sum", **ROUTE) == pytest.approx(0.04)


def test_series_of_gateways_are_bounded():
    metrics = Metrics(100.0)
    metrics.count_http(Counts({f"/{number} 200": 1 for number in range(1000)}))
    metrics.count_http(Counts({"/0 200": 2}))
    found = samples(metrics)
    assert len([key for key in found if key[0] == "engine_http_requests_total"]) == HTTP_SERIES_MAX
    assert of(found, "engine_http_requests_total", path="/0", status="200") == 3
