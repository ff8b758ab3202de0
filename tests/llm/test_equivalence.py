"""The most valuable test: the same ids alone, batched, chunked, from the prefix cache, preempted, overlapped.

The fake model's next id depends on every id it reads back through the block table, so a wrong block, slot, length or
eviction shows at once.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.llm.bench import Bench, oracle, sequence

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=10)


@settings(max_examples=60)
@given(prompts, st.integers(1, 12))
def test_same_ids_however_it_is_run(given_prompts: list[list[int]], max_tokens: int):
    benches = {
        "alone": Bench(max_num_seqs=1, is_cached=False, max_batched_tokens=256),
        "batched": Bench(is_cached=False, max_batched_tokens=256),
        "chunked": Bench(is_cached=False, max_batched_tokens=9),
        "cached": Bench(max_batched_tokens=9),
        "preempted": Bench(num_blocks=14, max_batched_tokens=16, max_num_seqs=10),
        "overlapped": Bench(num_blocks=14, max_batched_tokens=16, max_num_seqs=10, depth=2),
    }
    for name, bench in benches.items():
        made = [sequence(number, prompt, max_tokens) for number, prompt in enumerate(given_prompts, 1)]
        for each in made:
            bench.scheduler.add(each)
        bench.run()
        for each in made:
            assert bench.ids(each.request) == oracle(each, max_tokens), name
        assert bench.is_back_to_base(), name


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_and_hits_really_happen(depth: int):
    """The property above would prove nothing if its small pools never preempted and never hit."""
    bench = Bench(num_blocks=14, max_batched_tokens=16, max_num_seqs=10, depth=depth)
    for number in range(1, 9):
        bench.scheduler.add(sequence(number, [number % 2] * 17, 12))
    bench.run()
    told = bench.scheduler.statistics()
    assert told.num_preemptions > 0
    assert told.num_hit_tokens > 0
    assert told.num_evicted_blocks > 0
