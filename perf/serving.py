"""Tokens per second of a real model through the whole engine: so many streams at once, 128 tokens in, 128 out.

Ceiling: the decode steps of the same batch alone (`perf/decode.py`); what is lost against it is the prefill of the
prompts, the wire and the client, which shares the cores. A closed burst, greedy, end of text ignored; prompts are
random ids, so that nothing is found in the cache.

    python perf/serving.py [MODEL] [--quick] [--streams 64]
"""

import asyncio
import itertools
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipc.client import AsyncClient, client_address
from ipc.messages import Delta, Finished
from perf.decode import model, option
from perf.report import finish, is_quick, quantiles, spread, table
from tests.system.harness import engine

TOKENS_IN, TOKENS_OUT = 128, 128


async def one(client: AsyncClient, prompt: list[int]) -> list[float]:
    """Seconds from the request to each of its tokens."""
    started, times = time.perf_counter(), []
    stream = await client.stream("model", prompt, max_tokens=TOKENS_OUT, ignore_eos=True)
    async for event in stream:
        if isinstance(event, Delta | Finished):
            times += [time.perf_counter() - started] * len(event.ids)
    return times


async def burst(address: str, num_streams: int, dice: random.Random) -> dict[str, float]:
    async with AsyncClient(address) as client:
        prompts = [[dice.randrange(100, 40_000) for _ in range(TOKENS_IN)] for _ in range(num_streams)]
        started = time.perf_counter()
        times = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        spent = time.perf_counter() - started
    gaps = [later - earlier for each in times for earlier, later in itertools.pairwise(each)]
    assert all(len(each) == TOKENS_OUT for each in times)
    return {
        "tokens_per_s": num_streams * TOKENS_OUT / spent,
        "itl_p50_ms": quantiles(gaps)["p50"] * 1e3,
        "itl_p99_ms": quantiles(gaps)["p99"] * 1e3,
        "ttft_p50_ms": quantiles([each[0] for each in times])["p50"] * 1e3,
    }


def main() -> None:
    dice, num_runs = random.Random(7), 1 if is_quick() else 3
    limits = (
        "max_model_len = 512\nmax_num_seqs = 64\nmax_batched_tokens = 256\n[deployment.restart]\nhang_floor_s = 60\n"
    )
    toml = f'[[deployment]]\nroute = "model"\nmodel = "{model()}"\n[deployment.llm]\n{limits}'
    only = option("--streams", 0)
    results = {}
    with engine(toml) as running:
        running.wait_ready(600.0)
        for num_streams in [only] if only else [1, 16, 64]:
            runs = [asyncio.run(burst(client_address(running.run_dir), num_streams, dice)) for _ in range(num_runs)]
            results[num_streams] = {name: spread([run[name] for run in runs]) for name in runs[0]}
    names = ["tokens_per_s", "itl_p50_ms", "itl_p99_ms", "ttft_p50_ms"]
    table(["streams", *names], [[count, *(each[name]["median"] for name in names)] for count, each in results.items()])
    finish("serving", {"model": model(), "runs": num_runs, "streams": results})


if __name__ == "__main__":
    main()
