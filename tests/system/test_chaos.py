"""Everything at once, for a while: streams, whole answers, cancels, deadlines, clients and workers killed at random.

Slow; run it with `bin/test -m slow tests/system/test_chaos.py`. The seed is printed, and decides what happens.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter

import pytest

from engine.sim.model import Oracle
from ipc.client import AsyncClient, client_address
from ipc.errors import EngineError
from ipc.messages import FINAL, Delta, Failed, Finished
from tests.system.harness import EngineProcess, engine, sim_toml, until

SECONDS = float(os.environ.get("ENGINE_CHAOS_S", "30"))
SEED = int(os.environ.get("ENGINE_CHAOS_SEED", time.monotonic_ns() % 1_000_000))


async def one(client: AsyncClient, dice: random.Random, tally: Counter) -> None:
    prompt, seed = f"chaos {dice.randrange(20)} " * dice.randrange(1, 30), dice.randrange(1000)
    oracle = Oracle("sim-1", list(prompt.encode()), seed, 0, 257)
    options = {"max_tokens": dice.randrange(1, 120), "seed": seed, "ignore_eos": True}
    if dice.random() < 0.2:
        options["deadline_ms"] = dice.randrange(1, 400)
    if dice.random() < 0.3:
        options |= {"priority": dice.choice(["realtime", "batch"]), "tenant": dice.choice("ab")}
    cancel_after = dice.randrange(0, 60) if dice.random() < 0.3 else None
    finals = 0
    stream = await client.stream("sim", prompt, **options)
    async for event in stream:
        if isinstance(event, Delta | Finished):
            oracle.check(event.ids)
        if cancel_after is not None and oracle.num_checked >= cancel_after:
            stream.cancel()
            cancel_after = None
        if isinstance(event, FINAL):
            finals += 1
            tally[event.code if isinstance(event, Failed) else type(event).__name__] += 1
    assert finals == 1
    if isinstance(event, Finished):
        assert oracle.num_checked == options["max_tokens"]


async def client_for_a_while(address: str, dice: random.Random, end_at: float, tally: Counter) -> None:
    """Clients come, ask several things at once, and go: politely or not."""
    while time.monotonic() < end_at:
        client = AsyncClient(address)
        await client.connect()
        asked = [asyncio.create_task(one(client, dice, tally)) for _ in range(dice.randrange(1, 12))]
        if dice.random() < 0.2:
            await asyncio.sleep(dice.random() * 0.3)
            await client.close()  # with requests open: each ends once, here
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            if isinstance(result, EngineError):
                tally[f"not sent: {result.code.value}"] += 1
            elif result is not None:
                raise result
        await client.close()


async def kill_workers(running: EngineProcess, dice: random.Random, end_at: float, tally: Counter) -> None:
    while time.monotonic() < end_at:
        await asyncio.sleep(dice.random() * 2)
        pids = await asyncio.to_thread(running.worker_pids)
        if pids:
            try:
                os.kill(dice.choice(pids), signal.SIGKILL)
                tally["workers killed"] += 1
            except ProcessLookupError:
                pass


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_chaos():
    print(f"ENGINE_CHAOS_SEED={SEED}")
    dice, tally = random.Random(SEED), Counter()
    toml = sim_toml(
        replicas=3,
        seats=8,
        num_blocks=300,
        step_ms=3,
        queue="max_queued = 60",
        restart="intensity = 10000\nbackoff_s = 0.01\nbackoff_max_s = 0.1",
    )
    with engine(toml) as running:
        running.wait_ready()

        async def everything() -> None:
            end_at = time.monotonic() + SECONDS
            address = client_address(running.run_dir)
            async with asyncio.TaskGroup() as group:
                group.create_task(kill_workers(running, dice, end_at, tally))
                for _ in range(12):
                    group.create_task(client_for_a_while(address, dice, end_at, tally))

        asyncio.run(everything())
        print(dict(tally))
        running.wait_ready()
        until(lambda: running.status().counters.num_open == 0, what="nothing open")
        until(lambda: running.status().counters.num_sessions == 0, what="no session")
        report = running.status()
        counters = report.counters
        assert counters.internal_errors == counters.protocol_errors == 0
        assert counters.accepted == counters.finished + counters.failed + counters.cancelled + counters.expired
        until(lambda: all(each.num_free_blocks == each.num_blocks for each in running.replicas()), what="blocks back")
        assert all(each.num_in_flight == 0 for each in running.replicas())
    assert {"Finished", "Cancelled", "Expired", "worker_lost"} <= set(tally)
