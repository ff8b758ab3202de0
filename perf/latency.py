"""What the engine adds to a token's way, at half load: open-loop arrivals, one replica's steps known exactly.

Ceiling: the fake model's own time. A request that arrives while a step runs waits for the rest of it, and with two
steps in flight for the one after: TTFT is between one and three steps, whatever the engine does; the gap between
tokens is exactly one step. What is beyond is ours.

    python perf/latency.py [--quick]
"""

import asyncio
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop

from ipc.client import AsyncClient, client_address
from ipc.messages import FINAL
from perf.report import finish, is_quick, quantiles, table
from tests.system.harness import engine, sim_toml

STEP_MS = 15.0
TOKENS = 40
REPLICAS = 4
SEATS = 16


async def load(address: str, seconds: float) -> dict[str, object]:
    """Poisson arrivals at half of what the seats can do; arrivals do not wait for answers."""
    rate = 0.5 * REPLICAS * SEATS / (TOKENS * STEP_MS / 1e3)
    dice = random.Random(7)
    first_s: list[float] = []
    gaps_s: list[float] = []
    cpu_s, started = time.process_time(), time.perf_counter()
    async with AsyncClient(address, name="perf/latency") as client:

        async def one(number: int) -> None:
            at = time.perf_counter()
            is_first = True
            stream = await client.stream("sim", f"request {number}", max_tokens=TOKENS, ignore_eos=True)
            async for event in stream:
                now = time.perf_counter()
                (first_s if is_first else gaps_s).append(now - at)
                at, is_first = now, False
                if isinstance(event, FINAL):
                    break

        async with asyncio.TaskGroup() as group:
            due, number = time.perf_counter(), 0
            while due < started + seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(number))
                number += 1
                due += dice.expovariate(rate)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - started)
    return {"first": first_s, "gaps": gaps_s, "client": share, "rate": rate}


def main() -> None:
    with engine(sim_toml(replicas=REPLICAS, seats=SEATS, step_ms=STEP_MS)) as running:
        running.wait_ready()
        told = uvloop.run(load(client_address(running.run_dir), 8.0 if is_quick() else 25.0))
    first = {name: value * 1e3 for name, value in quantiles(told["first"]).items()}
    added_gap = {name: value * 1e3 - STEP_MS for name, value in quantiles(told["gaps"]).items()}
    table(
        ["ms", "p50", "p90", "p99", "max"],
        [["time to first token", *first.values()], ["gap between tokens - step", *added_gap.values()]],
    )
    print(
        f"{told['rate']:.0f} requests/s, {len(told['gaps']):,} gaps; the client used {told['client']:.0%} of one core"
    )
    numbers = {"ttft_ms": first, "added_gap_ms": added_gap, "client_cores": told["client"], "step_ms": STEP_MS}
    finish("latency", numbers)


if __name__ == "__main__":
    main()
