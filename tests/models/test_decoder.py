"""The decoder on a tiny random model: the same ids however it is run, and a naive forward pass beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.reference import TILE, Span, attend
from engine.llm.blocks import BlockPool
from engine.llm.model_runner import ModelRunner
from engine.llm.scheduler import Limits, Scheduler
from engine.llm.sequence import Sampling, Sequence
from engine.models.decoder import rms_norm, rope_table, rotate
from engine.models.gguf import Gguf
from engine.models.linear import Linear
from engine.worker.load_llm import build
from tests.llm.bench import Bench
from tests.models_tiny import write

BLOCK = 4
SAMPLINGS = [None, Sampling(0.9, 0, 1.0, 0.0), Sampling(1.3, 5, 1.0, 0.0), Sampling(0.8, 0, 0.7, 0.05)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Gguf:
    return Gguf(write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def bench(file: Gguf, num_blocks: int = 64, **options: int | bool) -> Bench:
    made = Bench(num_blocks=num_blocks, block_size=BLOCK, **options)
    made.runner = ModelRunner(build(file, file.config(), num_blocks * BLOCK), BLOCK, made.max_num_seqs)
    made.scheduler = Scheduler(
        Limits(made.max_num_seqs, made.max_batched_tokens, 100), BlockPool(num_blocks, BLOCK, made.is_cached)
    )
    return made


def run(made: Bench, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    for number, prompt in enumerate(prompts, 1):
        sampling = SAMPLINGS[number % 4]
        made.scheduler.add(
            Sequence(number, list(prompt), len(prompt), max_tokens, ignore_eos=True, seed=number, sampling=sampling)
        )
    made.run()
    assert made.is_back_to_base()
    return [made.ids(number) for number in range(1, len(prompts) + 1)]


def test_same_ids_alone_batched_chunked_cached_and_preempted(file: Gguf):
    dice = np.random.default_rng(3)
    head = dice.integers(0, 250, 12).tolist()
    prompts = [[*head[: number % 13], *dice.integers(0, 250, 1 + number * 2).tolist()] for number in range(8)]
    runs = {
        "alone": bench(file, max_num_seqs=1, is_cached=False, max_batched_tokens=64),
        "batched": bench(file, is_cached=False, max_batched_tokens=256),
        "chunked": bench(file, is_cached=False, max_batched_tokens=9),
        "cached": bench(file, max_batched_tokens=11),
        "preempted": bench(file, num_blocks=14, max_batched_tokens=16),
    }
    expected = run(runs.pop("alone"), prompts, 12)
    assert len({tuple(each) for each in expected}) > 4
    for name, made in runs.items():
        assert run(made, prompts, 12) == expected, name
    assert runs["preempted"].scheduler.statistics().num_preemptions > 0
    assert runs["cached"].scheduler.statistics().num_hit_tokens > 0


def test_one_thread_or_two(file: Gguf):
    before, prompts = torch.get_num_threads(), [[5, 6, 7, 8], [9, 10]]
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(bench(file), prompts, 10))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_the_probe_finds_it_row_exact(file: Gguf):
    runner = ModelRunner(build(file, file.config(), 256), BLOCK, 8)
    assert runner.warm(64)
    assert not runner._decoder.k_cache.any()


def test_against_a_naive_forward_pass(file: Gguf):
    """No cache, no tiles, no packing: the formulas as they are written."""
    config, ids = file.config(), [3, 50, 100, 7, 9, 200]
    hidden, size = config.hidden_size, config.head_size

    def weight(name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(file.tensor(name, shape)).double()

    def pairs(x: torch.Tensor) -> torch.Tensor:
        """Rope in the file's own interleaved order."""
        angles = torch.arange(len(ids)).double()[:, None] * config.rope_base ** (-torch.arange(size // 2) * 2.0 / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    x = weight("token_embd.weight", config.vocab_size, hidden)[ids]
    for layer in range(config.num_layers):
        at, heads, kv = f"blk.{layer}.", config.num_heads, config.num_kv_heads
        normed = rms_norm(x, weight(f"{at}attn_norm.weight", hidden), config.norm_eps).double()
        q = pairs((normed @ weight(f"{at}attn_q.weight", heads * size, hidden).T).view(-1, heads, size))
        k = pairs((normed @ weight(f"{at}attn_k.weight", kv * size, hidden).T).view(-1, kv, size))
        v = (normed @ weight(f"{at}attn_v.weight", kv * size, hidden).T).view(-1, kv, size)
        scores = torch.einsum("thd,sgd->hts", q, k) / size**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hts,sgd->thd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ weight(f"{at}attn_output.weight", hidden, heads * size).T
        normed = rms_norm(x, weight(f"{at}ffn_norm.weight", hidden), config.norm_eps).double()
        gate = torch.nn.functional.silu(normed @ weight(f"{at}ffn_gate.weight", config.ffn_size, hidden).T)
        x = (
            x
            + (gate * (normed @ weight(f"{at}ffn_up.weight", config.ffn_size, hidden).T))
            @ weight(f"{at}ffn_down.weight", hidden, config.ffn_size).T
        )
    x = rms_norm(x, weight("output_norm.weight", hidden), config.norm_eps).double()
    expected = x[-1] @ weight("token_embd.weight", config.vocab_size, hidden).T

    decoder = build(file, config, 64)
    positions = torch.arange(len(ids))
    spans = [Span(0, len(ids), 0, torch.cat([positions, torch.zeros(TILE - len(ids), dtype=torch.long)]))]
    got = decoder.forward(torch.tensor(ids), positions, positions, spans, torch.tensor([len(ids) - 1]))[0]
    assert torch.allclose(got.double(), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 2**16))
def test_attention_of_a_row_depends_on_that_row_alone(length: int, seed: int):
    dice = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(256, 3, 64, generator=dice) for _ in range(2))
    q = torch.randn(length, 9, 64, generator=dice)
    slots = torch.randperm(256, generator=dice)

    def span(start: int, count: int, first: int) -> Span:
        end = first + count
        return Span(start, count, first, torch.cat([slots[:end], torch.zeros(-end % TILE, dtype=torch.long)]))

    whole = attend(q, k, v, [span(0, length, 0)])
    cut = int(torch.randint(0, length, (1,), generator=dice))
    last = attend(q[cut : cut + 1], k, v, [span(0, 1, cut)])
    assert torch.equal(whole[cut : cut + 1], last)
    if 0 < cut < length:
        both = attend(q, k, v, [span(0, cut, 0), span(cut, length - cut, cut)])
        assert torch.equal(whole, both)


@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576), (64, 16), (49, 31)])
def test_a_product_of_a_row_depends_on_that_row_alone(shape: tuple[int, int]):
    dice = torch.Generator().manual_seed(1)
    linear = Linear(torch.randn(*shape, generator=dice))
    x = torch.randn(300, shape[1], generator=dice)
    expected = linear(x[:1])
    for count in (1, 2, 3, 4, 5, 16, 17, 64, 255, 300):
        assert torch.equal(linear(x[:count])[:1], expected)
        moved = torch.cat([x[1:count], x[:1]])
        assert torch.equal(linear(moved)[-1:], expected)


def test_rope_turns_by_position_and_keeps_length(file: Gguf):
    cos, sin = rope_table(file.config(), 32)
    x = torch.randn(32, 3, 16)
    turned = rotate(x, cos[:, None], sin[:, None])
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_a_row_that_is_not_finite_fails_alone(file: Gguf):
    made = bench(file)
    made.runner._decoder.embedding[77] = torch.nan
    for number, prompt in ((1, [5, 6]), (2, [77]), (3, [8])):
        made.scheduler.add(Sequence(number, prompt, len(prompt), 4, ignore_eos=True))
    made.run()
    assert [len(made.ids(number)) for number in (1, 2, 3)] == [4, 0, 4]
    (failed,) = [each for each in made.emissions if each.sequence.request == 2]
    assert failed.reason == "failed"
