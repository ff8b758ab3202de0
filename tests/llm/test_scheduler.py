"""Exact steps, blocks, preemptions and ends; and a state machine that cancels at the worst moment."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.llm.sequence import FinishReason
from ipc.errors import Code, EngineError
from tests.llm.bench import Bench, oracle, sequence


def chunks(bench: Bench) -> list[tuple[int, int, int]]:
    """The last launched step as (request, start, length)."""
    return [(each.sequence.request, each.start, each.length) for each in bench.flights[-1][0].chunks]


def test_a_prompt_and_decoding_sequences_share_one_budget():
    bench = Bench(max_batched_tokens=10)
    bench.scheduler.add(sequence(1, [1, 2, 3]))
    bench.launch()
    assert chunks(bench) == [(1, 0, 3)]
    bench.commit()
    bench.scheduler.add(sequence(2, list(range(20))))
    bench.launch()
    assert chunks(bench) == [(1, 3, 1), (2, 0, 9)]
    bench.commit()
    bench.launch()
    assert chunks(bench) == [(1, 4, 1), (2, 9, 9)]
    bench.commit()
    bench.launch()
    assert chunks(bench) == [(1, 5, 1), (2, 18, 2)]


def test_blocks_are_allocated_as_positions_are_reached():
    bench = Bench(block_size=4)
    made = sequence(1, [1, 2, 3, 4, 5])
    bench.scheduler.add(made)
    bench.launch()
    assert made.block_table == [0, 1]
    bench.commit()
    for expected in ([0, 1], [0, 1], [0, 1], [0, 1, 2]):
        bench.launch()
        assert made.block_table == expected
        bench.commit()


def test_the_youngest_gives_way_and_keeps_its_tokens():
    bench = Bench(num_blocks=4, block_size=2, is_cached=False, max_model_len=9)
    old, young = sequence(1, [1, 2, 3], 5), sequence(2, [4, 5, 6], 5)
    bench.scheduler.add(old)
    bench.scheduler.add(young)
    bench.turn()  # 2 + 2 blocks, both at 3 tokens
    bench.turn()  # both at 4
    bench.turn()  # old needs a third block: young gives both of its own
    assert (old.num_preempted, young.num_preempted) == (0, 1)
    assert young.num_output_tokens == 2
    bench.run()
    assert bench.ids(1) == oracle(old, 5)
    assert bench.ids(2) == oracle(young, 5)
    assert old.num_preempted == 0


def test_equals_never_take_turns_preempting_each_other():
    """vllm-project/vllm#41952: two requests swapped for ever."""
    bench = Bench(num_blocks=6, block_size=2, is_cached=False, max_model_len=12)
    made = [sequence(number, [number, 2, 3], 8) for number in (1, 2, 3)]
    for each in made:
        bench.scheduler.add(each)
    bench.run(200)
    assert made[0].num_preempted == 0
    assert [bench.ids(each.request) == oracle(each, 8) for each in made] == [True] * 3


def test_more_sequences_than_blocks_all_finish():
    """RBLN-SW/vllm-rbln#179: 17 blocks, 32 requests of two blocks each, no progress and no error."""
    bench = Bench(num_blocks=17, block_size=4, max_num_seqs=32, max_batched_tokens=64, is_cached=False)
    made = [sequence(number, [number, 1, 2], 5) for number in range(1, 33)]
    for each in made:
        bench.scheduler.add(each)
    bench.run(500)
    assert all(bench.ids(each.request) == oracle(each, 5) for each in made)
    assert bench.is_back_to_base()


def test_a_hit_that_ends_inside_a_chunk_counts_the_rest_from_the_hit():
    """GeeeekExplorer/nano-vllm#210: prompt of 465, first 256 shared, block 256, chunk 128."""
    shared, rest = list(range(256)), [number % 7 for number in range(209)]
    bench = Bench(num_blocks=8, block_size=256, max_batched_tokens=128, max_model_len=600)
    bench.scheduler.add(sequence(1, [*shared, 9, 9]))
    bench.run()
    second = sequence(2, shared + rest)
    bench.scheduler.add(second)
    bench.run()
    assert second.num_cached_tokens == 256
    assert bench.ids(2) == oracle(second, 8)


def test_the_same_prompt_hits_from_the_second_time_on():
    """ROCm/ATOM#939: the prefix cache silently never hit."""
    bench = Bench(num_blocks=200, max_model_len=600, max_batched_tokens=256)
    prompt = [number % 250 for number in range(512)]
    cached = []
    for number in (1, 2, 3):
        made = sequence(number, prompt, 4)
        bench.scheduler.add(made)
        bench.run()
        cached.append(made.num_cached_tokens)
        assert bench.ids(number) == oracle(made, 4)
    assert cached == [0, 508, 508]
    assert bench.scheduler.statistics().num_hit_tokens == 1016


def test_a_colliding_key_never_returns_foreign_blocks():
    """openvinotoolkit/openvino.genai#3722: with 8-bit keys and 500 prompts nearly every lookup collides."""
    bench = Bench(num_blocks=600, max_num_seqs=16, key_bytes=1, max_batched_tokens=256)
    dice = random.Random(5)
    made = [sequence(number, [dice.randrange(4) for _ in range(dice.randrange(5, 30))], 4) for number in range(1, 501)]
    for each in made:
        bench.scheduler.add(each)
    bench.run()
    assert all(bench.ids(each.request) == oracle(each, 4) for each in made)


def test_another_salt_shares_nothing():
    bench = Bench()
    prompt = list(range(20))
    bench.scheduler.add(sequence(1, prompt, namespace=b"a"))
    bench.run()
    other = sequence(2, prompt, namespace=b"b")
    bench.scheduler.add(other)
    bench.run()
    assert other.num_cached_tokens == 0


def test_identical_prompts_at_once_compute_their_blocks_once():
    bench = Bench(max_batched_tokens=64)
    prompt = list(range(21))
    made = [sequence(number, prompt) for number in (1, 2, 3)]
    for each in made:
        bench.scheduler.add(each)
    bench.launch()
    assert chunks(bench) == [(1, 0, 21)]
    bench.commit()
    bench.launch()
    assert chunks(bench) == [(1, 21, 1), (2, 20, 1), (3, 20, 1)]
    bench.run()
    assert all(bench.ids(each.request) == oracle(each, 8) for each in made)


@pytest.mark.parametrize("how", ["cancel", "preempt"])
def test_who_waits_for_a_block_goes_on_when_its_maker_is_gone(how: str):
    bench = Bench(max_batched_tokens=8)
    prompt = list(range(21))
    first, second = sequence(1, prompt), sequence(2, prompt)
    bench.scheduler.add(first)
    bench.scheduler.add(second)
    bench.launch()
    bench.commit()
    if how == "cancel":
        bench.scheduler.cancel(1)
    else:
        bench.scheduler._preempt(first)
    bench.run()
    assert bench.ids(2) == oracle(second, 8)
    assert bench.is_back_to_base()


@pytest.mark.parametrize("depth", [1, 2])
def test_ends(depth: int):
    bench = Bench(depth=depth, max_model_len=30)
    by_length, by_context = sequence(1, [1], 4), sequence(2, list(range(25)), 100)
    third = oracle(sequence(3, [5]), 3)
    by_stop_id = sequence(3, [5], 50, stop_ids=frozenset({third[2]}))
    late = sequence(4, [5], 50, stop_ids=frozenset(range(257)), min_tokens=6)
    for each in (by_length, by_context, by_stop_id, late):
        bench.scheduler.add(each)
    bench.run()
    assert [each.reason for each in (by_length, by_context, by_stop_id, late)] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.STOP,
    ]
    assert [len(bench.ids(number)) for number in (1, 2, 4)] == [4, 5, 6]
    assert bench.ids(3) == third[: third.index(third[2]) + 1]
    assert bench.is_back_to_base()


def test_the_end_of_text_ends_unless_it_is_ignored():
    def run(ignore_eos: bool) -> int:
        bench = Bench()
        made = sequence(1, [1, 2], 40, ignore_eos=ignore_eos, eos_ids=frozenset({oracle(sequence(1, [1, 2]), 3)[2]}))
        bench.scheduler.add(made)
        bench.run()
        return made.num_output_tokens

    assert (run(False), run(True)) == (3, 40)


def test_a_stop_found_in_one_step_discards_the_token_of_the_next():
    bench = Bench(depth=2)
    made = sequence(1, [1, 2, 3], 50)
    bench.scheduler.add(made)
    bench.launch()
    bench.launch()
    assert [each.ids for each in bench.commit()] == [oracle(made, 1)]
    bench.scheduler.finish(1, FinishReason.STOP)
    assert bench.scheduler.statistics().num_free_blocks == bench.num_blocks - 1  # a step still writes into it
    assert bench.commit() == []
    assert made.num_output_tokens == 1
    assert bench.is_back_to_base()
    bench.scheduler.audit()


def test_never_more_than_two_steps_at_once_and_never_beyond_max_tokens():
    bench = Bench(depth=2)
    made = sequence(1, [1], 2)
    bench.scheduler.add(made)
    assert [bench.launch() for _ in range(3)] == [True, True, False]
    bench.commit()
    assert not bench.launch()  # the second token is pending, and it is the last
    bench.commit()
    assert bench.ids(1) == oracle(made, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "field"),
    [
        ([], 1, Code.INVALID, "prompt"),
        (list(range(200)), 1, Code.TOO_LARGE, "prompt"),  # the context exactly
        (list(range(300)), 1, Code.TOO_LARGE, "prompt"),
        ([1], 150, Code.TOO_LARGE, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_by_name(prompt: list[int], max_tokens: int, code: Code, field: str):
    bench = Bench(num_blocks=30)
    with pytest.raises(EngineError) as caught:
        bench.scheduler.add(sequence(1, prompt, max_tokens))
    assert (caught.value.code, caught.value.field) == (code, field)
    assert bench.is_back_to_base()


def test_cancel_of_what_is_not_here_is_no():
    bench = Bench()
    assert not bench.scheduler.cancel(7)
    bench.scheduler.add(sequence(7, [1], 1))
    bench.run()
    assert not bench.scheduler.cancel(7)


def test_abort_and_natural_end_in_the_same_step():
    """ai-dynamo/dynamo#6681, vllm-project/vllm#56089: double free or assertion; each id ends exactly once."""
    dice = random.Random(1)
    bench = Bench(depth=2, num_blocks=40)
    ends: dict[int, int] = {}
    for number in range(1, 2001):
        bench.scheduler.add(sequence(number, [number % 50, 2, 3, 4, 5], 1))
        for _ in range(dice.randrange(3)):
            bench.turn()
        if dice.random() < 0.7:
            victim = dice.randrange(max(1, number - 4), number + 1)
            if bench.scheduler.cancel(victim):
                ends[victim] = ends.get(victim, 0) + 1
    bench.run()
    for each in bench.emissions:
        if each.reason is not None:
            ends[each.sequence.request] = ends.get(each.sequence.request, 0) + 1
    assert ends == dict.fromkeys(range(1, 2001), 1)
    assert bench.is_back_to_base()


class SchedulerMachine(RuleBasedStateMachine):
    """Anything in any order; the audit holds, and what was not cancelled says exactly what the chain says."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_blocks=12, block_size=2, max_num_seqs=4, max_batched_tokens=7, max_model_len=20, depth=2)
        self.made = {}
        self.cancelled: set[int] = set()

    @rule(length=st.integers(1, 12), kind=st.integers(0, 1), max_tokens=st.integers(1, 7))
    def add(self, length: int, kind: int, max_tokens: int) -> None:
        number = len(self.made) + 1
        self.made[number] = sequence(number, [kind] * length, max_tokens)
        self.bench.scheduler.add(self.made[number])

    @precondition(lambda self: len(self.bench.flights) < 2)
    @rule()
    def launch(self) -> None:
        self.bench.launch()

    @precondition(lambda self: self.bench.flights)
    @rule()
    def commit(self) -> None:
        self.bench.commit()

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.made)))
        if self.bench.scheduler.cancel(number):
            self.cancelled.add(number)

    @invariant()
    def adds_up(self) -> None:
        self.bench.scheduler.audit()

    def teardown(self) -> None:
        self.bench.run(2_000)
        assert self.bench.is_back_to_base()
        for number, each in self.made.items():
            ids = self.bench.ids(number)
            assert ids == oracle(each, len(ids))
            if number not in self.cancelled:
                assert len(ids) == each.max_tokens


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
