"""Scheduling of several answers, of prompts that are only scored, and of the borders of length, budget and pool."""

import pytest

from engine.llm.batch import rows
from engine.llm.blocks import BlockPool
from engine.llm.scheduler import Limits, Scheduler
from engine.llm.sequence import FinishReason, Sequence
from ipc.errors import Code, EngineError
from tests.llm.bench import Bench, oracle, sequence


def test_answers_share_the_blocks_of_their_prompt():
    bench = Bench(num_blocks=64, max_batched_tokens=64)
    prompt = list(range(3)) * 6  # 18 tokens: four full blocks and a bit
    for choice in range(3):
        bench.scheduler.add(Sequence(1, list(prompt), 18, 4, choice=choice, ignore_eos=True))
    step = bench.scheduler.schedule()
    assert [(chunk.sequence.choice, chunk.start, chunk.length) for chunk in step.chunks] == [(0, 0, 18)]
    bench.scheduler.commit(step, [5])
    step = bench.scheduler.schedule()
    assert [(chunk.sequence.choice, chunk.start, chunk.length) for chunk in step.chunks] == [
        (0, 18, 1),
        (1, 16, 2),
        (2, 16, 2),
    ]
    bench.scheduler.audit()


def test_an_answer_is_known_by_request_and_choice():
    scheduler = Scheduler(Limits(4, 64, 64), BlockPool(16, 4))
    scheduler.add(Sequence(1, [1], 1, 4))
    scheduler.add(Sequence(1, [1], 1, 4, choice=1))
    with pytest.raises(EngineError) as caught:
        scheduler.add(Sequence(1, [1], 1, 4, choice=1))
    assert caught.value.code is Code.DUPLICATE
    assert scheduler.cancel(1, 1)
    assert not scheduler.cancel(1, 1)
    assert scheduler.finish(1, FinishReason.STOP)
    scheduler.audit()


def test_every_answer_is_that_of_its_own_choice():
    bench = Bench(num_blocks=20, max_batched_tokens=7, max_num_seqs=3)
    made = [sequence(1, [1, 2] * 9, 12, choice=choice) for choice in range(5)]
    for each in made:
        bench.scheduler.add(each)
    bench.run()
    texts = [oracle(each, 12) for each in made]
    assert [each.token_ids[18:] for each in made] == texts
    assert len({tuple(each) for each in texts}) == 5


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("is_scored", [True, False])
def test_a_prompt_without_an_answer_is_computed_and_ends(budget: int, is_scored: bool):
    """vllm#6521: max_tokens 0."""
    bench = Bench(num_blocks=64, max_batched_tokens=budget)
    bench.scheduler.add(Sequence(1, [1] * 10, 10, 0, num_logprobs=0, is_scored=is_scored))
    steps = 0
    while (step := bench.scheduler.schedule()) is not None:
        assert not any(chunk.is_sampled for chunk in step.chunks)
        emissions = bench.scheduler.commit(step, [])
        steps += 1
    assert [(each.ids, each.reason) for each in emissions] == [([], FinishReason.LENGTH)]
    assert steps == -(-10 // budget)
    assert bench.is_back_to_base()


def test_a_scored_prompt_is_computed_from_its_beginning():
    bench = Bench(num_blocks=64, max_batched_tokens=64)
    bench.scheduler.add(Sequence(1, [1] * 10, 10, 1, ignore_eos=True))
    bench.run()
    bench.scheduler.add(Sequence(2, [1] * 10, 10, 1, ignore_eos=True, num_logprobs=1, is_scored=True))
    bench.scheduler.add(Sequence(3, [1] * 10, 10, 1, ignore_eos=True))
    step = bench.scheduler.schedule()
    assert [(chunk.start, chunk.length) for chunk in step.chunks] == [(0, 10), (8, 2)]
    assert [list(row.targets) for row in rows(step)] == [[1] * 9, []]


def test_targets_of_chunks_follow_each_token():
    bench = Bench(num_blocks=64, max_batched_tokens=4)
    bench.scheduler.add(Sequence(1, [5, 6, 7, 8, 9, 10], 6, 2, ignore_eos=True, num_logprobs=0, is_scored=True))
    first = bench.scheduler.schedule()
    assert list(rows(first)[0].targets) == [6, 7, 8, 9]
    bench.scheduler.commit(first, [])
    second = bench.scheduler.schedule()
    assert list(rows(second)[0].targets) == [10]


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(513, 4, "too_large"), (512, 1, "too_large"), (511, 9, 1), (200, 500, 312), (1, 511, 511), (1, 1, 1)],
)
def test_borders_of_the_context(length: int, max_tokens: int, expected: int | str):
    """vllm#42381: one over the context, exactly, one under; and a prompt that fits whose answer cannot."""
    bench = Bench(num_blocks=128, max_batched_tokens=128)
    bench.scheduler = Scheduler(Limits(8, 128, 512), BlockPool(128, 4))
    made = sequence(1, [1] * length, max_tokens)
    if isinstance(expected, str):
        with pytest.raises(EngineError) as caught:
            bench.scheduler.add(made)
        assert (caught.value.code.value, caught.value.field) == (expected, "prompt")
    else:
        bench.scheduler.add(made)
        bench.run()
        assert made.num_output_tokens == expected
        assert made.reason is FinishReason.LENGTH
    after = sequence(2, [1] * 3, 2)
    bench.scheduler.add(after)
    bench.run()
    assert after.num_output_tokens == 2
    assert bench.is_back_to_base()


@pytest.mark.parametrize("budget", [1, 2, 127, 128, 129, 500, 501])
def test_a_prompt_around_the_budget_of_a_step_is_served(budget: int):
    """vllm-metal#200: a prompt over the step's token budget was never scheduled."""
    bench = Bench(num_blocks=200, max_batched_tokens=budget)
    bench.scheduler = Scheduler(Limits(8, budget, 512), BlockPool(200, 4))
    made = sequence(1, [1] * 500, 3)
    bench.scheduler.add(made)
    bench.run()
    assert made.token_ids[500:] == oracle(made, 3)


def test_a_long_prompt_stops_nobody():
    """vllm#1026: in every step of a long prefill each running sequence gets its token."""
    bench = Bench(num_blocks=600, max_batched_tokens=32, max_num_seqs=8)
    bench.scheduler = Scheduler(Limits(8, 32, 2048), BlockPool(600, 4, False))
    for number in range(1, 5):
        bench.scheduler.add(sequence(number, [number % 3], 500))
    first = bench.scheduler.schedule()
    bench.scheduler.commit(first, [1] * 4)
    bench.scheduler.add(sequence(9, [1] * 1500, 1))
    steps = 0
    while True:
        step = bench.scheduler.schedule()
        assert [chunk.sequence.request for chunk in step.chunks[:4]] == [1, 2, 3, 4]
        assert step.num_tokens <= 32
        bench.scheduler.commit(step, [1] * sum(chunk.is_sampled for chunk in step.chunks))
        steps += 1
        if step.chunks[-1].sequence.request == 9 and step.chunks[-1].is_sampled:
            break
    assert steps == -(-1500 // 28)
