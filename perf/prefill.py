"""What a prompt costs: chunks of several sizes up to a length, the real runner on the real model, in this process.

Physics. A chunk computes 2 operations per weight and token, plus 4 per head feature, token and key for attention, and
reads every weight once. Ceiling in tokens/s = chunk / (operations / speed), with the speed of all products at the
chunk's own number of rows, measured in turn: what is lost against it is attention, small operations and Python.

    python perf/prefill.py [MODEL] [--quick] [--length 1024]
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.llm.model_runner import ModelRunner
from engine.llm.runner import Row
from perf.decode import BLOCK, make, model, num_weights, option, product_s, products, took
from perf.report import finish, is_quick, table

CHUNKS = (32, 64, 128, 256, 512)


def prefill(runner: ModelRunner, length: int, chunk: int) -> None:
    blocks = range((length + BLOCK - 1) // BLOCK)
    for at in range(0, length, chunk):
        size = min(chunk, length - at)
        runner.launch(
            [Row(0, at, [5 + number % 999 for number in range(size)], blocks, length, 0, 0, at + size == length)]
        )


def main() -> None:
    length, num_runs = option("--length", 1024), 2 if is_quick() else 5
    runner = make(length + BLOCK, max(512, length))
    linears = products(runner)
    weights = num_weights(linears)
    whole: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
    bare: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
    prefill(runner, 128, 64)
    for _ in range(num_runs):
        for chunk in CHUNKS:
            whole[chunk].append(took(lambda chunk=chunk: prefill(runner, length, chunk)))
            bare[chunk].append(product_s(linears, chunk))
    results = []
    for chunk in CHUNKS:
        spent, product = statistics.median(whole[chunk]), statistics.median(bare[chunk])
        ceiling = chunk / product
        results.append(
            {
                "chunk": chunk,
                "tokens_per_s": length / spent,
                "low": length / max(whole[chunk]),
                "high": length / min(whole[chunk]),
                "ceiling_tokens_per_s": ceiling,
                "share": length / spent / ceiling,
                "gflops": 2 * weights * length / spent / 1e9,
            }
        )
    print(f"{runner.decoder.config.name}, fp32, {length} tokens, {torch.get_num_threads()} threads, {num_runs} runs")
    names = ["chunk", "tokens_per_s", "low", "high", "ceiling_tokens_per_s", "share", "gflops"]
    table(names, [[each[name] for name in names] for each in results])
    finish("prefill", {"model": model(), "length": length, "chunks": results})


if __name__ == "__main__":
    main()
