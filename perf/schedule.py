"""What the host must do per step: schedule(), rows() and commit(), all Python.

Ceiling: one pass over the sequences that increments a number and appends to a list, in the same interpreter; nothing
that keeps a record per sequence can be faster. A step of a real model takes some milliseconds, so at 256 sequences the
scheduler should stay below one: on a GPU the host's share of a step is hidden only while it is shorter than the step.

Steady decode with two steps in flight, as the worker runs: contexts begin at 185..200, so that in every step one
sequence in 16 needs a new block and publishes a full one to the prefix cache. Every run begins with fresh sequences.

    python perf/schedule.py [--quick]
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.llm.batch import rows
from engine.llm.blocks import BlockPool
from engine.llm.scheduler import Limits, Scheduler, Step
from engine.llm.sequence import Sequence
from perf.report import Spread, alternate_parts, between, finish, is_quick, table

CONTEXT = 200
BLOCK = 16
GOAL_US = 1_000


def decoding(num_seqs: int, num_steps: int) -> Scheduler:
    """`num_seqs` sequences past their prompts, with room for the whole measurement."""
    num_blocks = num_seqs * ((CONTEXT + num_steps) // BLOCK + 2)
    limits = Limits(num_seqs, num_seqs * CONTEXT, 100_000)  # all prompts fit into the first step
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK))
    for number in range(num_seqs):
        prompt = [number % 256, number // 256, *range(CONTEXT - 2 - number % BLOCK)]
        scheduler.add(Sequence(number, prompt, len(prompt), num_steps + 8, ignore_eos=True))
    step = scheduler.schedule()
    if step is None or len(step.chunks) != num_seqs:
        raise RuntimeError("not all prompts fit into one step")
    scheduler.commit(step, [7] * num_seqs)
    return scheduler


def real(num_seqs: int, num_steps: int) -> dict[str, float]:
    """Mean microseconds of each call over one run, and the slowest schedule()."""
    scheduler = decoding(num_seqs, num_steps)
    sampled = [7] * num_seqs
    spent = {"schedule": 0.0, "rows": 0.0, "commit": 0.0}
    slowest = 0.0
    before: Step | None = scheduler.schedule()
    for _ in range(num_steps):
        at = time.perf_counter()
        step = scheduler.schedule()
        scheduled_at = time.perf_counter()
        if step is None or before is None or len(step.chunks) != num_seqs:
            raise RuntimeError("a sequence was left out")
        rows(step)
        built_at = time.perf_counter()
        scheduler.commit(before, sampled)
        ended_at = time.perf_counter()
        before = step
        spent["schedule"] += scheduled_at - at
        spent["rows"] += built_at - scheduled_at
        spent["commit"] += ended_at - built_at
        slowest = max(slowest, scheduled_at - at)
    told = {name: value / num_steps * 1e6 for name, value in spent.items()}
    return {**told, "all": sum(told.values()), "slowest_schedule": slowest * 1e6}


def bare(num_seqs: int, num_steps: int) -> dict[str, float]:
    twins: list[dict[str, Any]] = [{"n": 0, "ids": []} for _ in range(num_seqs)]
    started = time.perf_counter()
    for _ in range(num_steps):
        for each in twins:
            each["n"] += 1
            each["ids"].append(7)
    return {"all": (time.perf_counter() - started) / num_steps * 1e6}


def main() -> None:
    numbers: dict[int, dict[str, Spread]] = {}
    lines: list[list[object]] = []
    num_steps = 32 if is_quick() else 96
    for num_seqs in (1, 4, 16, 64, 256, 1024):
        contenders = {
            "real": partial(real, num_seqs, num_steps),
            "bare": partial(bare, num_seqs, num_steps),
        }
        result = alternate_parts(contenders, 3 if is_quick() else 7)
        numbers[num_seqs] = each = {**result["real"], "bare": result["bare"]["all"]}
        names = ("schedule", "rows", "commit", "all", "bare")
        ratios = [each[name]["median"] / each["bare"]["median"] for name in ("schedule", "all")]
        lines.append([num_seqs, *(each[name]["median"] for name in names), *ratios, between(each["schedule"])])
    header = ["sequences", "schedule us", "rows us", "commit us", "all us", "bare us", "schedule x", "all x", "spread"]
    table(header, lines)
    at_256 = numbers[256]["schedule"]["median"]
    print(f"goal: schedule() <= {GOAL_US:,} us at 256 sequences: {at_256:,.0f} us, {at_256 / GOAL_US:.2f} of it")
    finish("schedule", {"num_steps": num_steps, "us": numbers})


if __name__ == "__main__":
    main()
