"""Owns what every benchmark ends with: alternating runs, medians with spread, a table, and a last line of JSON.

Knows no benchmark. Absolute times on a shared machine mean little, and its speed drifts within seconds: each benchmark
has a bare twin that does the least any program could, run in turn with it; the ratio of the two is what lasts.
"""

import json
import os
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
Spread = dict[str, float]


def spread(values: list[float]) -> Spread:
    """Median, lowest and highest of some runs."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def alternate(contenders: dict[str, Callable[[], float]], num_runs: int = 5) -> dict[str, Spread]:
    """Run each contender in turn, `num_runs` times; the spread of what each returns."""
    parts = alternate_parts(
        {name: lambda contender=contender: {"": contender()} for name, contender in contenders.items()}, num_runs
    )
    return {name: each[""] for name, each in parts.items()}


def alternate_parts(
    contenders: dict[str, Callable[[], dict[str, float]]], num_runs: int = 5
) -> dict[str, dict[str, Spread]]:
    """As `alternate`, for contenders that return several figures of one run."""
    results: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for _ in range(num_runs):
        for name, contender in contenders.items():
            for part, value in contender().items():
                results[name].setdefault(part, []).append(value)
    return {name: {part: spread(values) for part, values in parts.items()} for name, parts in results.items()}


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


def between(values: Spread) -> str:
    """Lowest and highest, for a table."""
    return f"{_cell(values['low'])}-{_cell(values['high'])}"


def table(header: list[str], rows: list[list[object]]) -> None:
    """Print aligned columns; numbers with three digits of interest."""
    cells = [header, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _rounded(value: Any) -> Any:
    """Four significant digits: more are noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(name): _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def finish(name: str, numbers: dict[str, Any]) -> None:
    """The last line: where, when and on what, and the numbers."""
    told = {
        "bench": name,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)},
        "versions": {
            "python": platform.python_version(),
            "libzmq": zmq.zmq_version(),
            "msgspec": msgspec.__version__,
        },
        "numbers": _rounded(numbers),
    }
    print(json.dumps(told))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def is_quick() -> bool:
    return "--quick" in sys.argv
