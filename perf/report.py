"""Owns what every benchmark ends with: alternating runs, medians, a table, and one JSON object on the last line.

Knows no benchmark. Absolute times on a shared machine mean little: each benchmark has a bare twin in the same run.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import zmq

ROOT = Path(__file__).resolve().parents[1]


def alternate(contenders: dict[str, Callable[[], float]], num_runs: int = 5) -> dict[str, dict[str, float]]:
    """Run each contender in turn, `num_runs` times; median, lowest and highest of what each returns."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_runs):
        for name, contender in contenders.items():
            results[name].append(contender())
    return {
        name: {"median": statistics.median(each), "low": min(each), "high": max(each)} for name, each in results.items()
    }


def per_call_us(operation: Callable[[], object], num_calls: int) -> float:
    """Microseconds of one call, over `num_calls` of them."""
    started = time.perf_counter()
    for _ in range(num_calls):
        operation()
    return (time.perf_counter() - started) / num_calls * 1e6


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1]}


def table(header: list[str], rows: list[list[object]]) -> None:
    """Print aligned columns; numbers with three digits of interest."""
    cells = [header, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _cell(value: object) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )


def finish(name: str, numbers: dict[str, Any]) -> None:
    """The last line: where, when and on what, and the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    print(
        json.dumps(
            {
                "bench": name,
                "commit": commit,
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "machine": {"cpu": _cpu(), "cores": len(_affinity())},
                "versions": {
                    "python": platform.python_version(),
                    "libzmq": zmq.zmq_version(),
                    "msgspec": msgspec.__version__,
                },
                "numbers": numbers,
            }
        )
    )


def _affinity() -> set[int]:
    import os

    return os.sched_getaffinity(0)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def is_quick() -> bool:
    return "--quick" in sys.argv
