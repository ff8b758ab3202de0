"""What may be loaded where: each module in a fresh interpreter, and none of them brings torch."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import engine
import ipc

ROOT = Path(__file__).resolve().parents[1]
# The real model's side: what a worker imports once it knows that it serves one, and nobody else.
WITH_TORCH = (
    "engine.models.",
    "engine.attention.",
    "engine.llm.model_runner",
    "engine.llm.sampler",
    "engine.worker.load_llm",
    "engine.worker.load_text",
    "engine.worker.export",
)
WITH_HTTP = ("engine.gateway.http", "engine.gateway.streaming", "engine.gateway.main")
HEAVY = {"torch", "numpy", "aiohttp", "pynvml"}


def modules() -> list[str]:
    found = [
        module.name
        for package in (ipc, engine)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.endswith("__main__")
    ]
    assert len(found) > 40
    return [name for name in found if not name.startswith((*WITH_TORCH, *WITH_HTTP))]


def loaded_by(code: str) -> set[str]:
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(told.stdout.splitlines()[-1]))


def test_no_module_brings_torch():
    """One interpreter imports all of them; if a heavy one shows up, the next test says who brought it."""
    loaded = loaded_by("\n".join(f"import {name}" for name in modules()))
    assert HEAVY.isdisjoint(loaded)


@pytest.mark.parametrize(
    "name", ["engine.front.main", "engine.supervisor.main", "engine.worker.main", "engine.sim.model", "engine.serve"]
)
def test_no_actor_brings_torch(name: str):
    assert HEAVY.isdisjoint(loaded_by(f"import {name}"))


def test_a_gateway_brings_http_and_no_torch():
    loaded = loaded_by("import engine.gateway.main")
    assert HEAVY & loaded == {"aiohttp"}


def test_the_client_stands_alone():
    loaded = loaded_by("import ipc.client")
    assert not {name for name in loaded if name.partition(".")[0] == "engine"}
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"__main__"}
    by_their_own = {"cython_runtime", "typing_extensions"}  # what pyzmq and msgspec take along when it is there
    assert {name for name in foreign if not name.startswith("_")} <= {"ipc", "msgspec", "zmq"} | by_their_own


def test_a_worker_brings_neither_the_front_nor_its_loop():
    loaded = loaded_by("import engine.worker.main")
    assert {"uvloop", "structlog", "click", "engine.front", "engine.supervisor"}.isdisjoint(loaded)


def test_help_is_quick_because_it_loads_nothing():
    loaded = loaded_by("import engine.cli")
    assert {"zmq", "msgspec", "structlog", "uvloop"}.isdisjoint(loaded)


def test_nothing_waits_by_the_wall_clock():
    """A deadline, a back-off or a heartbeat must not move when somebody sets the clock."""
    for path in {*ROOT.glob("ipc/**/*.py"), *ROOT.glob("engine/**/*.py")} - {ROOT / "engine/clock.py"}:
        assert "time.time(" not in path.read_text(), path
        assert "datetime.now" not in path.read_text(), path


def test_nothing_reads_a_pickle():
    """sgl-project/sglang#21435, InternLM/lmdeploy#4804: code execution from a socket."""
    for path in [*ROOT.glob("ipc/**/*.py"), *ROOT.glob("engine/**/*.py")]:
        assert "import pickle" not in path.read_text(), path
