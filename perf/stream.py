"""Many streams at once through a real engine, every id checked against the hash chain by a separate process.

Ceiling: streams / step time, when there is a seat for each; below it the cores rule, shared by front, workers and
client, whose shares are printed. A client that needs most of a core measures itself.

    python perf/stream.py [--streams 200] [--seconds 30] [--config configs/sim.toml] [--quick]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import uvloop

from engine.config import load
from engine.sim.model import Oracle
from ipc.client import AsyncClient, client_address
from ipc.messages import Delta, Finished
from perf.report import ROOT, finish, quantiles, table
from tests.system.harness import engine

MAX_TOKENS = 400


class Tally:
    """What the client process saw."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_streams = 0
        self.faults: list[str] = []
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []


async def one_stream(client: AsyncClient, tally: Tally, prompt: str, seed: int, version: str) -> None:
    oracle = Oracle(version, list(prompt.encode()), seed, 0, 257)
    asked_at = heard_at = time.perf_counter()
    stream = await client.stream("sim", prompt, max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True)
    async for event in stream:
        if not isinstance(event, Delta | Finished):
            tally.faults.append(repr(event))
            return
        now = time.perf_counter()
        if oracle.num_checked == 0:
            tally.first_s.append(now - asked_at)
        else:
            tally.gaps_s.append(now - heard_at)
        heard_at = now
        try:
            oracle.check(event.ids)
        except ValueError as fault:
            tally.faults.append(str(fault))
            return
        tally.num_tokens += len(event.ids)
    if oracle.num_checked != MAX_TOKENS:
        tally.faults.append(f"{oracle.num_checked} of {MAX_TOKENS} tokens came")
    tally.num_streams += 1


async def client_side(address: str, num_streams: int, seconds: float, version: str) -> None:
    """Keeps `num_streams` open for `seconds`; prints its tally as JSON."""
    tally = Tally()
    async with AsyncClient(address, name="perf/stream") as client:
        end_at = time.perf_counter() + seconds

        async def keep_open(number: int) -> None:
            turn = 0
            while time.perf_counter() < end_at:
                await one_stream(client, tally, f"stream {number}, turn {turn}", number, version)
                turn += 1

        cpu_s, started = time.process_time(), time.perf_counter()
        await asyncio.gather(*(keep_open(number) for number in range(num_streams)))
        elapsed_s = time.perf_counter() - started
        told = {
            "tokens_per_s": tally.num_tokens / elapsed_s,
            "num_tokens": tally.num_tokens,
            "num_streams": tally.num_streams,
            "num_faults": len(tally.faults),
            "faults": tally.faults[:5],
            "client_cores": (time.process_time() - cpu_s) / elapsed_s,
            "first_ms": {name: value * 1e3 for name, value in quantiles(tally.first_s).items()},
            "gap_ms": {name: value * 1e3 for name, value in quantiles(tally.gaps_s).items()},
        }
    print(json.dumps(told))


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--config", default="configs/sim.toml")
    parser.add_argument("--quick", action="store_true", help="ten seconds")
    parser.add_argument("--client", nargs=2, metavar=("ADDRESS", "VERSION"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    seconds = 10.0 if asked.quick else asked.seconds
    if asked.client:
        uvloop.run(client_side(asked.client[0], asked.streams, seconds, asked.client[1]))
        return
    path = ROOT / asked.config
    (deployment,) = load(str(path), [], {}).deployment
    seats = deployment.replicas * deployment.llm.max_num_seqs
    ceiling = min(asked.streams, seats) / (deployment.sim.step_ms / 1e3)
    with engine(path.read_text()) as running:
        running.wait_ready()
        pids = {"front": [running.pid], "workers": running.worker_pids()}
        before = {name: sum(map(cpu_s, each)) for name, each in pids.items()}
        started = time.perf_counter()
        command = [sys.executable, __file__, "--streams", str(asked.streams), "--seconds", str(seconds), "--client"]
        ended = subprocess.run(
            [*command, client_address(running.run_dir), deployment.sim.version],
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            sys.exit(ended.stderr)
        elapsed_s = time.perf_counter() - started
        cores = {name: (sum(map(cpu_s, each)) - before[name]) / elapsed_s for name, each in pids.items()}
    told = json.loads(ended.stdout)
    told |= {"front_cores": cores["front"], "workers_cores": cores["workers"], "ceiling_tokens_per_s": ceiling}
    table(
        ["streams", "tokens/s", "ceiling", "share", "faults", "front cores", "worker cores", "client cores"],
        [
            [
                asked.streams,
                told["tokens_per_s"],
                ceiling,
                told["tokens_per_s"] / ceiling,
                told["num_faults"],
                cores["front"],
                cores["workers"],
                told["client_cores"],
            ]
        ],
    )
    step_ms = deployment.sim.step_ms
    added = {name: round(value - step_ms, 2) for name, value in told["gap_ms"].items()}
    if told["num_faults"]:
        print(f"FAULTS: {told['faults']}")
    else:
        print(f"{told['num_tokens']:,} tokens, {told['num_streams']} streams, checked: 0 lost, doubled or reordered")
    print(f"gap between tokens less the step of {step_ms:g} ms: p50 {added['p50']} ms, p99 {added['p99']} ms")
    print(f"the client used {told['client_cores']:.0%} of one core")
    finish("stream", {name: value for name, value in told.items() if name != "faults"} | {"added_gap_ms": added})
    if told["num_faults"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
