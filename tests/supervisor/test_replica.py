"""Every move of a replica, on a clock moved by hand and a process that does what it is told."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.supervisor.replica import (
    BOOT_TRIES,
    DUMP_S,
    REAP_S,
    Action,
    Move,
    Replica,
    RestartPolicy,
    Seen,
    Target,
    apply,
    decide,
)
from engine.supervisor.states import TRANSITIONS, ReplicaState, advance
from ipc.health import Page, Phase
from tests.fakes import FakeClock, ScriptedProcess

S = ReplicaState
LEGAL = {
    ("stopped", "starting"),
    *(("starting", to) for to in ("ready", "suspect", "stopping", "backoff", "failed", "stopped")),
    *(("ready", to) for to in ("suspect", "draining", "backoff", "failed", "stopped")),
    *(("suspect", to) for to in ("quarantined", "backoff", "failed", "stopped")),
    *(("draining", to) for to in ("stopping", "suspect", "stopped", "backoff", "failed")),
    *(("stopping", to) for to in ("stopped", "quarantined")),
    *(("backoff", to) for to in ("starting", "stopped")),
    *(("quarantined", to) for to in ("stopped", "backoff", "failed")),
    *(("failed", to) for to in ("starting", "stopped")),
}


@pytest.mark.parametrize(("state", "to"), list(itertools.product(S, S)))
def test_moves(state: ReplicaState, to: ReplicaState):
    if (state.value, to.value) in LEGAL:
        assert advance(state, to) is to
    else:
        with pytest.raises(ValueError, match="cannot go"):
            advance(state, to)


def test_the_table_names_every_state():
    assert set(TRANSITIONS) == set(S)


class Bench:
    """The supervisor's shell in miniature: look, decide, do, write down."""

    def __init__(self, **policy: float) -> None:
        self.clock = FakeClock()
        self.policy = RestartPolicy(**policy)
        self.replica = Replica(0, "r", 0)
        self.process: ScriptedProcess | None = None
        self.is_stuck = False
        self.said_ready = self.is_empty = False
        self.phase, self.deadline_at, self.lateness_s = Phase.LOADING, math.inf, 0.0
        self.actions: list[str] = []

    def look(self) -> Move | None:
        process = self.process
        seen = Seen(
            has_process=process is not None,
            exit_status=process.status if process else None,
            page=Page(self.replica.epoch, self.phase, self.deadline_at) if process else None,
            said_ready=self.said_ready,
            is_empty=self.is_empty,
            lateness_s=self.lateness_s,
        )
        move = decide(self.replica, seen, self.policy, self.clock.now(), lambda: 0.0)
        if move is not None:
            apply(self.replica, move, self.policy, self.clock.now())
            self._do(move.action)
        return move

    def _do(self, action: Action) -> None:
        self.actions.append(action.value)
        if action is Action.SPAWN:
            self.process = ScriptedProcess()
            self.process.is_stuck = self.is_stuck
            self.said_ready = self.is_empty = False
            self.phase, self.deadline_at = Phase.LOADING, math.inf
        elif action is Action.KILL:
            self.process.kill()
        elif action is Action.TERMINATE:
            self.process.terminate()
        elif action is Action.REAP:
            self.process = None

    def get_ready(self) -> "Bench":
        while self.replica.state is not S.STARTING:
            self.clock.advance(0.1)
            self.look()
        self.said_ready, self.phase = True, Phase.IDLE
        self.look()
        assert self.replica.state is S.READY
        return self

    def after(self, seconds: float) -> ReplicaState:
        self.clock.advance(seconds)
        self.look()
        return self.replica.state


def test_ready_needs_the_word_and_the_page():
    bench = Bench()
    assert bench.look() == Move(S.STARTING, Action.SPAWN)
    assert bench.look() is None
    bench.phase = Phase.IDLE
    assert bench.look() is None  # it has not said so
    bench.said_ready, bench.phase = True, Phase.WARMING
    assert bench.look() is None  # it says so, and is still warming up
    bench.phase = Phase.IDLE
    bench.clock.advance(0.4)
    assert bench.look() == Move(S.READY, Action.ADMIT)
    assert bench.replica.ready_after_s == pytest.approx(0.4)


def test_the_epoch_rises_before_each_spawn():
    bench = Bench(backoff_s=1.0)
    bench.get_ready()
    assert bench.replica.epoch == 1
    bench.process.exit(-9)
    assert bench.after(0) is S.BACKOFF
    assert bench.after(0.9) is S.BACKOFF
    assert bench.after(0.2) is S.STARTING
    assert bench.replica.epoch == 2


def test_backoff_doubles_to_its_cap_and_jitters_upwards():
    policy = RestartPolicy(backoff_s=0.5, backoff_max_s=3.0)
    assert [policy.delay_s(number, lambda: 0.0) for number in (1, 2, 3, 4, 60)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.delay_s(1, lambda: 1.0) == pytest.approx(0.625)


def test_more_deaths_than_the_intensity_is_failed_and_brief_success_forgives_nothing():
    """curie-eng/curie#2637: each brief success cleared the counter, so it never gave up."""
    bench = Bench(intensity=3, period_s=60.0, backoff_s=0.1)
    for _ in range(3):
        bench.get_ready().process.exit(1)
        assert bench.after(2.0) is S.BACKOFF
    bench.get_ready().process.exit(1)
    assert bench.after(2.0) is S.FAILED
    assert "4 deaths in 60 s" in bench.replica.reason
    assert bench.after(1000.0) is S.FAILED


def test_deaths_far_apart_are_survived_for_ever():
    bench = Bench(intensity=1, period_s=10.0, backoff_s=0.1)
    for _ in range(20):
        bench.get_ready().process.exit(1)
        assert bench.after(11.0) is S.BACKOFF
    assert bench.replica.num_deaths == 20
    assert len(bench.replica.deaths) <= 2


def test_exit_78_is_never_retried():
    bench = Bench()
    bench.look()
    bench.process.exit(78)
    assert bench.after(0) is S.FAILED
    assert "configuration" in bench.replica.reason


def test_another_boot_failure_has_three_tries():
    bench = Bench(intensity=100, backoff_s=0.1)
    for attempt in range(1, BOOT_TRIES + 1):
        while bench.replica.state is not S.STARTING:
            bench.after(1.0)
        bench.process.exit(1)
        expected = S.FAILED if attempt == BOOT_TRIES else S.BACKOFF
        assert bench.after(0) is expected


def test_a_start_that_takes_too_long_is_hung():
    bench = Bench(boot_s=5.0)
    bench.look()
    assert bench.after(4.9) is S.STARTING
    assert bench.after(0.2) is S.SUSPECT


def test_a_passed_deadline_is_suspect_then_killed_then_restarted():
    bench = Bench(backoff_s=0.5)
    bench.get_ready()
    bench.phase, bench.deadline_at = Phase.STEPPING, bench.clock.now() + 1.0
    assert bench.after(0.9) is S.READY
    assert bench.after(0.2) is S.SUSPECT
    assert bench.actions[-1] == "dump"
    assert bench.after(DUMP_S + 0.01) is S.SUSPECT
    assert bench.actions[-1] == "kill"
    assert bench.after(0.01) is S.BACKOFF
    assert bench.replica.reason.startswith("killed by SIGKILL, hung in stepping")


def test_a_process_that_survives_its_kill_is_quarantined_and_its_slot_not_reused():
    bench = Bench()
    bench.is_stuck = True
    bench.get_ready()
    bench.deadline_at = bench.clock.now() - 1
    assert bench.after(0) is S.SUSPECT
    bench.after(DUMP_S + 0.01)
    assert bench.after(REAP_S) is S.SUSPECT
    assert bench.after(0.1) is S.QUARANTINED
    assert bench.after(1000.0) is S.QUARANTINED
    assert bench.actions.count("spawn") == 1
    bench.process.exit(-9)
    assert bench.after(0) is S.BACKOFF


def test_the_judges_own_lateness_is_not_held_against_the_worker():
    bench = Bench()
    bench.get_ready()
    bench.deadline_at = bench.clock.now() + 1.0
    bench.lateness_s = 5.0
    assert bench.after(5.5) is S.READY
    bench.lateness_s = 0.0
    assert bench.after(0.1) is S.SUSPECT


def test_a_page_of_an_older_epoch_or_a_corrupt_one():
    bench = Bench()
    bench.get_ready()
    old = Seen(has_process=True, page=Page(epoch=0, deadline_at=0.0))
    assert decide(bench.replica, old, bench.policy, bench.clock.now(), lambda: 0.0) is None
    corrupt = Seen(has_process=True, page=Page(epoch=1, deadline_at=math.inf, is_corrupt=True))
    assert decide(bench.replica, corrupt, bench.policy, bench.clock.now(), lambda: 0.0).to is S.SUSPECT


def test_drain_waits_for_the_last_request_then_terminates():
    bench = Bench(drain_s=30.0)
    bench.get_ready()
    bench.replica.target = Target.STOP
    assert bench.look() == Move(S.DRAINING, Action.PAUSE)
    assert bench.after(5.0) is S.DRAINING
    bench.is_empty = True
    assert bench.look() == Move(S.STOPPING, Action.TERMINATE)
    assert bench.after(0.1) is S.STOPPED
    assert bench.replica.num_deaths == 0
    bench.replica.target = Target.RUN
    assert bench.after(0.1) is S.STARTING


def test_drain_has_an_end():
    bench = Bench(drain_s=3.0, stop_grace_s=2.0)
    bench.is_stuck = True
    bench.get_ready()
    bench.replica.target = Target.STOP
    bench.look()
    assert bench.after(3.1) is S.STOPPING
    assert bench.after(1.9) is S.STOPPING
    assert bench.actions[-1] == "terminate"
    bench.after(0.2)
    assert bench.actions[-1] == "kill"
    assert bench.after(REAP_S + 0.1) is S.QUARANTINED


def test_stopping_while_starting_or_waiting():
    bench = Bench()
    bench.look()
    bench.replica.target = Target.STOP
    assert bench.after(0) is S.STOPPING
    assert bench.after(0.1) is S.STOPPED
    waiting = Bench(backoff_s=50.0, backoff_max_s=50.0)
    waiting.look()
    waiting.process.exit(1)
    assert waiting.after(0) is S.BACKOFF
    waiting.replica.target = Target.STOP
    assert waiting.after(0) is S.STOPPED


events = st.lists(
    st.sampled_from(["ready", "die", "die78", "exit0", "hang", "empty", "stop", "run", "wait", "late", "stuck"]),
    max_size=40,
)


@settings(max_examples=300)
@given(events)
def test_it_never_sticks_between_states(given_events: list[str]):
    """pytorch/serve#1815: stuck between dying and restart. Left alone, every replica comes to rest."""
    bench = Bench(intensity=4, period_s=20.0, backoff_s=0.1, boot_s=5.0, drain_s=3.0, stop_grace_s=1.0)
    for event in given_events:
        if event == "ready":
            bench.said_ready, bench.phase = True, Phase.IDLE
        elif event in {"die", "die78", "exit0"} and bench.process:
            bench.process.exit({"die": -11, "die78": 78, "exit0": 0}[event])
        elif event == "hang":
            bench.deadline_at = bench.clock.now()
        elif event == "empty":
            bench.is_empty = True
        elif event in {"stop", "run"}:
            bench.replica.target = Target(event)
        elif event == "stuck":
            bench.is_stuck = not bench.is_stuck
        bench.after(7.0 if event == "late" else 0.3)
    for _ in range(400):
        if bench.process and bench.replica.state is S.STARTING:
            bench.said_ready, bench.phase = True, Phase.IDLE
        bench.after(0.2)
    resting = {S.READY, S.FAILED, S.QUARANTINED} if bench.replica.target is Target.RUN else {S.STOPPED, S.QUARANTINED}
    assert bench.replica.state in resting
    assert (bench.process is None) == (bench.replica.state in {S.FAILED, S.STOPPED})
