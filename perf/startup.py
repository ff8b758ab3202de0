"""How long a cold start takes, by phase, and how soon a killed worker is READY again.

Ceiling: an interpreter that imports msgspec and zmq and ends: no worker of this design can be up sooner. Fresh engines,
one sim worker, no back-off; medians.

    python perf/startup.py [--quick]
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perf.report import finish, is_quick, table
from tests.system.harness import EngineProcess, engine, sim_toml, until


def bare() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import msgspec, zmq"], check=True)
    return time.perf_counter() - started


def is_ready_again(running: EngineProcess, pid: int) -> bool:
    (replica,) = running.replicas() or [None]
    return replica is not None and replica.state == "ready" and replica.pid != pid


def one() -> dict[str, float]:
    started = time.perf_counter()
    with engine(sim_toml(restart="backoff_s = 0.0\nintensity = 100")) as running:
        running.wait_ready()
        ready_s = time.perf_counter() - started
        (replica,) = running.replicas()
        killed_at = time.perf_counter()
        os.kill(replica.pid, signal.SIGKILL)
        until(lambda: is_ready_again(running, replica.pid))
        again_s = time.perf_counter() - killed_at
    return {
        "bare imports": bare(),
        "worker: spawn -> READY": replica.ready_after_s,
        "engine: command -> READY": ready_s,
        "kill -9 -> READY again": again_s,
    }


def main() -> None:
    runs = [one() for _ in range(3 if is_quick() else 5)]
    names = list(runs[0])
    medians = {name: statistics.median(run[name] for run in runs) for name in names}
    floor = medians["bare imports"]
    table(
        ["phase", "seconds", "x bare", "spread"],
        [
            [
                name,
                medians[name],
                medians[name] / floor,
                f"{min(r[name] for r in runs):.2f}-{max(r[name] for r in runs):.2f}",
            ]
            for name in names
        ],
    )
    print(f"goal: worker READY < 0.6 s: {medians['worker: spawn -> READY']:.2f} s (median of {len(runs)})")
    finish("startup", {name: round(value, 3) for name, value in medians.items()})


if __name__ == "__main__":
    main()
