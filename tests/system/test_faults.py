"""Workers and fronts are killed, hung and broken; nothing hangs, nothing is left behind, and it comes back."""

import os
import random
import signal
import threading

import psutil
import pytest

from ipc.errors import Code, EngineError
from ipc.messages import FINAL, Failed, Finished
from tests.system.harness import EngineProcess, engine, is_gone, sim_toml, until

MANY_DEATHS = "intensity = 1000\nbackoff_s = 0.01\nbackoff_max_s = 0.05"


def state_of(running: EngineProcess, slot: int = 0) -> str:
    replicas = running.replicas()
    return replicas[slot].state if len(replicas) > slot else ""


def ready_with_another_pid(running: EngineProcess, slot: int, pid: int) -> bool:
    replicas = running.replicas()
    return bool(replicas) and replicas[slot].state == "ready" and replicas[slot].pid not in {0, pid}


def test_a_worker_killed_twenty_times_comes_back_each_time_and_no_request_hangs():
    """pytorch/serve#1815, Kludex/uvicorn#632: stuck between dying and restart while clients time out."""
    dice = random.Random(20)
    with engine(sim_toml(replicas=2, restart=MANY_DEATHS)) as running, running.wait_ready().client() as client:
        ends: list[object] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                events = list(client.stream("sim", "hello", max_tokens=40, ignore_eos=True))
                ends.append(events[-1])
                assert sum(isinstance(each, FINAL) for each in events) == 1

        askers = [threading.Thread(target=ask) for _ in range(8)]
        for each in askers:
            each.start()
        for _ in range(20):
            slot = dice.randrange(2)
            pid = running.replicas()[slot].pid
            os.kill(pid, signal.SIGKILL)
            until(lambda slot=slot, pid=pid: ready_with_another_pid(running, slot, pid), what="READY again")
        is_over.set()
        for each in askers:
            each.join(10)
            assert not each.is_alive(), "a request hangs"
        lost = [each for each in ends if isinstance(each, Failed)]
        assert lost
        assert {each.code for each in lost} == {"worker_lost"}
        assert all(EngineError(Code(each.code), "").is_retryable for each in lost)
        assert any(isinstance(each, Finished) for each in ends)
        assert sum(each.num_deaths for each in running.replicas()) == 20
        children = psutil.Process(running.pid).children(recursive=True)
        assert len([each for each in children if each.status() != psutil.STATUS_ZOMBIE]) == 2
        assert not [each for each in children if each.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("moment", ["serving", "loading", "spawning"])
def test_kill_of_the_front_leaves_nothing_alive_and_harms_nobody_else(moment: str):
    """vllm-project/vllm#55510: workers lived on; NVIDIA/TensorRT-LLM#16404: a tree kill took unrelated siblings."""
    sim = "load_s = 30" if moment == "loading" else ""
    with engine(sim_toml()) as other, engine(sim_toml(replicas=3, sim=sim)) as running:
        other.wait_ready()
        if moment == "serving":
            running.wait_ready()
        elif moment == "loading":
            until(lambda: [each.phase for each in running.replicas()] == ["loading"] * 3, what="loading")
        else:
            until(lambda: psutil.Process(running.pid).children(), what="the first child")
        family = running.processes()
        running.signal(signal.SIGKILL)
        until(lambda: all(is_gone(pid) for pid in family), 5.0, "all children gone within 5 s")
        running.toml = sim_toml(replicas=3)
        running.start().wait_ready(5.0)
        with other.client() as client:
            assert client.generate("sim", "x", max_tokens=3, ignore_eos=True).reason == "length"
        assert len(other.processes()) == 2


def test_kill_of_the_front_ends_every_open_request_once():
    with engine(sim_toml(step_ms=20)) as running, running.wait_ready().client() as client:
        streams = [client.stream("sim", "x", max_tokens=3000, ignore_eos=True) for _ in range(5)]
        for each in streams:
            next(each)
        running.signal(signal.SIGKILL)
        for each in streams:
            events = list(each)
            assert isinstance(events[-1], Failed)
            assert events[-1].code == "unavailable"
            assert sum(isinstance(event, FINAL) for event in events) == 1
        running.start().wait_ready()
        answer = until(lambda: generate_or_none(client), what="the same client works with the next front")
        assert answer.reason == "length"


def generate_or_none(client):
    try:
        return client.generate("sim", "x", max_tokens=3, ignore_eos=True)
    except EngineError as error:
        if not error.is_retryable:
            raise
        return None


def test_a_hung_worker_is_found_by_its_own_deadline_and_replaced():
    toml = sim_toml(restart=MANY_DEATHS + "\nhang_floor_s = 0.7")
    with engine(toml) as running, running.wait_ready().client() as client:
        stream = client.stream("sim", "x", max_tokens=3000, ignore_eos=True)
        next(stream)
        pid = running.replicas()[0].pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: ready_with_another_pid(running, 0, pid), 10.0, "replaced")
        assert list(stream)[-1].code == "worker_lost"
        assert is_gone(pid)
        assert "hung in stepping" in running.replicas()[0].reason


def test_a_front_that_stood_still_blames_nobody_for_it():
    """Stopped for longer than every heartbeat, then continued: the sessions and workers it finds are fine."""
    toml = sim_toml(front="heartbeat_s = 0.1\nheartbeat_misses = 20", restart="hang_floor_s = 1.0")
    with engine(toml) as running, running.wait_ready().client() as client:
        pid = running.replicas()[0].pid
        running.signal(signal.SIGSTOP)
        threading.Event().wait(1.6)
        running.signal(signal.SIGCONT)
        assert client.generate("sim", "x", max_tokens=5, ignore_eos=True).reason == "length"
        report = running.status()
        assert report.counters.lost_peers == 0
        assert (report.replicas[0].pid, report.replicas[0].num_deaths) == (pid, 0)


def test_slow_steps_are_not_a_hang():
    toml = sim_toml(step_ms=700, restart="hang_floor_s = 1.0\nintensity = 0")
    with engine(toml) as running, running.wait_ready().client() as client:
        assert client.generate("sim", "x", max_tokens=3, ignore_eos=True).reason == "length"
        assert running.replicas()[0].num_deaths == 0


TWO_ROUTES = """
[[deployment]]
route = "bad"
runner = "sim"
[deployment.llm]
num_blocks = 128
[deployment.sim]
{sim}
[deployment.restart]
intensity = 3
period_s = 60
backoff_s = 0.05
backoff_max_s = 0.2

[[deployment]]
route = "good"
runner = "sim"
[deployment.llm]
num_blocks = 128
[deployment.sim]
step_ms = 2
"""


def bad(running: EngineProcess):
    return next((each for each in running.replicas() if each.route == "bad"), None)


def test_a_worker_that_always_dies_after_ready_ends_failed_and_others_serve():
    """curie-eng/curie#2637, bobmatnyc/trusty-tools#3631: each brief success cleared the counter."""
    with engine(TWO_ROUTES.format(sim="exit_after_s = 0.2")) as running:
        until(lambda: bad(running) and bad(running).state == "failed", what="FAILED")
        report = bad(running)
        assert report.num_deaths == 4
        assert "4 deaths in 60 s" in report.reason
        with running.client() as client:
            assert client.generate("good", "x", max_tokens=3, ignore_eos=True).reason == "length"
            assert {each.route: each.is_ready for each in client.models()} == {"bad": False, "good": True}
        assert running.status().state == "failed"


@pytest.mark.parametrize(("code", "num_starts"), [(78, 1), (70, 3)])
def test_a_broken_configuration_is_not_retried_and_another_boot_failure_three_times(code: int, num_starts: int):
    with engine(TWO_ROUTES.format(sim=f"exit_at_start = {code}")) as running:
        until(lambda: bad(running) and bad(running).state == "failed", what="FAILED")
        assert bad(running).epoch == num_starts
        assert f"exit code {code}" in bad(running).reason


def test_a_dead_worker_gets_no_traffic():
    """xorbitsai/inference#943: of two workers one is killed, then fifty requests at once all go to the other."""
    toml = sim_toml(replicas=2, restart="backoff_s = 30\nbackoff_max_s = 30")
    with engine(toml) as running, running.wait_ready().client() as client:
        os.kill(running.replicas()[1].pid, signal.SIGKILL)
        until(lambda: state_of(running, 1) == "backoff", what="BACKOFF")
        for each in [client.stream("sim", "x", max_tokens=5, ignore_eos=True) for _ in range(50)]:
            assert isinstance(list(each)[-1], Finished)


def test_with_every_worker_dead_the_engine_says_not_ready_within_three_seconds():
    """kserve/kserve#6259, vllm-project/vllm#39863: health 200 with the engine dead."""
    with engine(sim_toml(replicas=2, restart="intensity = 0")) as running, running.wait_ready().client() as client:
        for each in running.replicas():
            os.kill(each.pid, signal.SIGKILL)
        until(lambda: not client.models()[0].is_ready, 3.0, "not ready")
        assert running.status().state == "failed"
        (end,) = list(client.stream("sim", "x"))
        assert (end.code, end.message) == ("unavailable", "no replica of route sim can serve")


def test_what_waits_for_a_route_that_fails_for_good_is_told():
    toml = sim_toml(seats=1, restart="intensity = 0", step_ms=20)
    with engine(toml) as running, running.wait_ready().client() as client:
        streams = [client.stream("sim", "x", max_tokens=3000, ignore_eos=True) for _ in range(3)]
        next(streams[0])
        os.kill(running.replicas()[0].pid, signal.SIGKILL)
        assert [list(each)[-1].code for each in streams] == ["worker_lost", "unavailable", "unavailable"]
