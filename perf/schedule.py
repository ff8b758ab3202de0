"""What the host must do per step: schedule(), rows() and commit(), all Python.

Ceiling: one pass over the sequences that increments a number and appends to a list, in the same interpreter; nothing
that keeps a record per sequence can be faster. A step of a real model takes some milliseconds, so at 256 sequences the
scheduler should stay below one.

    python perf/schedule.py [--quick]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.llm.batch import rows
from engine.llm.blocks import BlockPool
from engine.llm.scheduler import Limits, Scheduler
from engine.llm.sequence import Sequence
from perf.report import alternate, finish, is_quick, table

CONTEXT = 200


def decoding(num_seqs: int) -> Scheduler:
    """`num_seqs` sequences past their prompts, with room for the whole measurement."""
    blocks = num_seqs * (CONTEXT + 1000) // 16 + num_seqs + 1
    limits = Limits(num_seqs, num_seqs * CONTEXT, 100_000)  # all prompts fit into the first step
    scheduler = Scheduler(limits, BlockPool(blocks, 16))
    for number in range(num_seqs):
        prompt = [number % 251, *range(CONTEXT - 1)]
        scheduler.add(Sequence(number, prompt, CONTEXT, 900, ignore_eos=True))
    while scheduler.statistics().num_waiting or any(each.num_output_tokens < 2 for each in scheduler._running):
        step = scheduler.schedule()
        if step is None:
            raise RuntimeError("the pool is too small for this benchmark")
        scheduler.commit(step, [7] * sum(chunk.is_sampled for chunk in step.chunks))
    return scheduler


def measure(num_seqs: int, num_steps: int) -> dict[str, dict[str, float]]:
    scheduler = decoding(num_seqs)
    spent = {"schedule": 0.0, "rows": 0.0, "commit": 0.0}
    twins: list[dict[str, object]] = [{"n": 0, "ids": []} for _ in range(num_seqs)]

    def real() -> float:
        for name in spent:
            spent[name] = 0.0
        for _ in range(num_steps):
            at = time.perf_counter()
            step = scheduler.schedule()
            scheduled_at = time.perf_counter()
            rows(step)
            built_at = time.perf_counter()
            scheduler.commit(step, [7] * num_seqs)
            spent["schedule"] += scheduled_at - at
            spent["rows"] += built_at - scheduled_at
            spent["commit"] += time.perf_counter() - built_at
        return sum(spent.values()) / num_steps * 1e6

    def bare() -> float:
        started = time.perf_counter()
        for _ in range(num_steps):
            for each in twins:
                each["n"] += 1
                each["ids"].append(7)
        return (time.perf_counter() - started) / num_steps * 1e6

    parts: dict[str, list[float]] = {name: [] for name in spent}

    def real_and_note() -> float:
        total = real()
        for name, value in spent.items():
            parts[name].append(value / num_steps * 1e6)
        return total

    result = alternate({"all": real_and_note, "bare": bare}, 3 if is_quick() else 5)
    for name, values in parts.items():
        values.sort()
        result[name] = {"median": values[len(values) // 2], "low": values[0], "high": values[-1]}
    return result


def main() -> None:
    numbers, lines = {}, []
    for num_seqs in (1, 4, 16, 64, 256, 1024):
        result = measure(num_seqs, 40 if is_quick() else 100)
        numbers[num_seqs] = {name: round(value["median"], 2) for name, value in result.items()}
        lines.append(
            [
                num_seqs,
                *(result[name]["median"] for name in ("schedule", "rows", "commit", "all", "bare")),
                result["all"]["median"] / result["bare"]["median"],
                f"{result['schedule']['low']:.3g}-{result['schedule']['high']:.3g}",
            ]
        )
    table(["sequences", "schedule us", "rows us", "commit us", "all us", "bare us", "x bare", "schedule spread"], lines)
    print(f"goal: schedule() <= 1,000 us at 256 sequences: {numbers[256]['schedule']:,.0f} us")
    finish("schedule", numbers)


if __name__ == "__main__":
    main()
