"""Every gate, its code, its field, and when a refused request should come back."""

import pytest

from engine.front.admission import RETRY_MAX_S, RETRY_MIN_S, Admission, Limits
from ipc.errors import Code, EngineError

LIMITS = Limits(body_bytes_max=1000, session_requests_max=10, requests_max=100)


@pytest.mark.parametrize(
    ("numbers", "code", "field"),
    [
        ((1001, 0, 0), Code.TOO_LARGE, "body"),
        ((10, 10, 20), Code.OVERLOADED, ""),
        ((10, 0, 100), Code.OVERLOADED, ""),
    ],
)
def test_static_limits(numbers: tuple[int, int, int], code: Code, field: str):
    with pytest.raises(EngineError) as caught:
        Admission(LIMITS).check(*numbers)
    assert (caught.value.code, caught.value.field) == (code, field)
    assert (caught.value.retry_after_s > 0) == (code is Code.OVERLOADED)


def test_at_the_limits_all_is_well():
    Admission(LIMITS).check(1000, 9, 99)
    Admission(LIMITS).check_queue("r", 9, 10)


def test_a_full_queue_says_when_half_of_it_will_have_gone():
    admission = Admission(LIMITS)
    for tick in range(51):
        admission.observe_end("r", tick / 50)  # 50 per second
    with pytest.raises(EngineError) as caught:
        admission.check_queue("r", 200, 200)
    assert caught.value.code is Code.OVERLOADED
    assert caught.value.retry_after_s == pytest.approx(2.0)


def test_the_time_to_come_back_is_bounded():
    admission = Admission(LIMITS)
    assert admission.retry_after_s("r", 10) == 1.0  # nothing measured
    for tick in range(3):
        admission.observe_end("r", tick * 100.0)
    assert admission.retry_after_s("r", 100_000) == RETRY_MAX_S
    fast = Admission(LIMITS)
    for tick in range(2001):
        fast.observe_end("r", tick / 2000)
    assert fast.retry_after_s("r", 1) == RETRY_MIN_S


def test_the_estimate_learns_how_many_bytes_a_token_has():
    admission = Admission(LIMITS)
    assert admission.cost("r", 400, 10) == 111
    for _ in range(100):
        admission.observe_prompt("r", 200, 100)
    assert admission.cost("r", 400, 10) == pytest.approx(211, abs=2)
    assert admission.cost("other", 400, 10) == 111
    admission.observe_prompt("r", 100, 0)
    assert admission.statistics("r").bytes_per_token == pytest.approx(2.0, abs=0.02)
