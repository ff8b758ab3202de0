"""The decoder on a tiny random model: the same ids however it is run, and a naive forward pass beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.reference import Span, attend, plan
from engine.llm.blocks import BlockPool
from engine.llm.model_runner import ModelRunner
from engine.llm.scheduler import Limits, Scheduler
from engine.llm.sequence import Sampling, Sequence
from engine.models.checkpoint import assemble
from engine.models.config import Rope
from engine.models.decoder import Decoder, rms_norm
from engine.models.gguf import Gguf
from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.linear import Linear
from engine.models.rope import inverse_frequencies, rotate, table
from tests.llm.bench import Bench
from tests.models_tiny import write

BLOCK = 4
SAMPLINGS = [None, Sampling(0.9, 0, 1.0, 0.0), Sampling(1.3, 5, 1.0, 0.0), Sampling(0.8, 0, 0.7, 0.05)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Gguf:
    return Gguf(write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def decoder(file: Gguf, num_slots: int, kv_dtype: torch.dtype = torch.float32) -> Decoder:
    made = assemble(GgufCheckpoint(file), torch.device("cpu"), torch.float32, 100)
    made.make_cache(num_slots, kv_dtype)
    return made


def bench(file: Gguf, num_blocks: int = 64, kv_dtype: torch.dtype = torch.float32, **options: int | bool) -> Bench:
    made = Bench(num_blocks=num_blocks, block_size=BLOCK, **options)
    made.runner = ModelRunner(decoder(file, num_blocks * BLOCK, kv_dtype), BLOCK, made.max_num_seqs, 1000)
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
        "one at a time": bench(file, is_cached=False, max_batched_tokens=1),
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
    runner = ModelRunner(decoder(file, 256), BLOCK, 8, 1000)
    assert runner.warm(64)
    assert not runner.decoder.k_cache.any()


def test_against_a_naive_forward_pass(file: Gguf):
    """No cache, no tiles, no packing: the formulas as they are written."""
    config, ids = GgufCheckpoint(file).config, [3, 50, 100, 7, 9, 200]
    hidden, size = config.hidden_size, config.head_size

    def weight(name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(file.tensor(name, shape)).double()

    def pairs(x: torch.Tensor) -> torch.Tensor:
        """Rope in the file's own interleaved order."""
        angles = torch.arange(len(ids)).double()[:, None] * config.rope.base ** (-torch.arange(size // 2) * 2.0 / size)
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

    made, positions = decoder(file, 64), torch.arange(len(ids))
    planned = plan([Span(0, len(ids), 0, range(16))], BLOCK, made.zero_slot, made.heads_per_kv, made.device)
    got = made.logits(made.forward(torch.tensor(ids), positions, positions, planned, torch.tensor([len(ids) - 1])))[0]
    assert torch.allclose(got.double(), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 2**16), st.sampled_from([torch.float32, torch.float16]))
def test_attention_of_a_row_depends_on_that_row_alone(length: int, seed: int, kv_dtype: torch.dtype):
    dice = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(3, 401, 64, generator=dice).to(kv_dtype) for _ in range(2))
    k[:, 400] = v[:, 400] = 0
    k[:, 300:400] = v[:, 300:400] = torch.nan  # somebody else's
    q = torch.randn(length, 9, 64, generator=dice)
    blocks, other = torch.randperm(100, generator=dice).tolist(), list(range(100))

    def attention(rows: torch.Tensor, *spans: Span) -> torch.Tensor:
        return attend(rows, k, v, plan(list(spans), 3, 400, 3, rows.device))

    whole = attention(q, Span(0, length, 0, blocks))
    cut = int(torch.randint(0, length, (1,), generator=dice))
    last = attention(q[cut : cut + 1], Span(0, 1, cut, blocks))
    assert torch.equal(whole[cut : cut + 1], last)
    many = torch.cat([q[cut : cut + 1], torch.randn(7, 9, 64, generator=dice), q[cut : cut + 1]])
    beside = attention(
        many, Span(0, 1, cut, blocks), *(Span(1 + at, 1, at * 29, other) for at in range(7)), Span(8, 1, cut, blocks)
    )
    assert torch.equal(beside[0], last[0])
    assert torch.equal(beside[8], last[0])
    if 0 < cut < length:
        both = attention(q, Span(0, cut, 0, blocks), Span(cut, length - cut, cut, blocks))
        assert torch.equal(whole, both)
    expected = naive(q, k[:, :300], v[:, :300], [blocks[at // 3] * 3 + at % 3 for at in range(length)])
    assert torch.allclose(whole.double(), expected, atol=1e-5)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Causal attention as it is written, in float64."""
    keys, values = (each[:, slots].double().repeat_interleave(3, 0) for each in (k, v))
    scores = torch.einsum("thd,hsd->hts", q.double(), keys) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(slots), len(slots)).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,hsd->thd", scores.softmax(-1), values).flatten(1)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_fp32(file: Gguf, dtype: torch.dtype):
    """What runs on a GPU, in its types, on the CPU: the same code."""
    ids = list(range(3, 90))
    made = assemble(GgufCheckpoint(file), torch.device("cpu"), dtype, 100)
    made.make_cache(128, dtype)
    positions = torch.arange(len(ids))
    got = {}
    for each in (made, decoder(file, 128)):
        planned = plan([Span(0, len(ids), 0, range(32))], BLOCK, each.zero_slot, each.heads_per_kv, each.device)
        hidden = each.forward(torch.tensor(ids), positions, positions, planned, positions)
        got[each.dtype] = each.logits(hidden)
        assert got[each.dtype].dtype == torch.float32
    error = (got[dtype] - got[torch.float32]).norm() / got[torch.float32].norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_rope_turns_by_position_and_keeps_length():
    cos, sin = table(*inverse_frequencies(Rope(), 16, 32, 32), 32)
    x = torch.randn(32, 3, 16)
    turned = rotate(x, cos[:, None], sin[:, None])
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_a_row_that_is_not_finite_fails_alone(file: Gguf):
    made = bench(file)
    made.runner.decoder.ends.embedding[77] = torch.nan
    for number, prompt in ((1, [5, 6]), (2, [77]), (3, [8])):
        made.scheduler.add(Sequence(number, prompt, len(prompt), 4, ignore_eos=True))
    made.run()
    assert [len(made.ids(number)) for number in (1, 2, 3)] == [4, 0, 4]
    (failed,) = [each for each in made.emissions if each.sequence.request == 2]
    assert failed.reason == "failed"
