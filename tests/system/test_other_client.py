"""The specification proved: a client in another style, without a line of ours, against a real engine."""

import re
import subprocess
import sys

from engine.sim.model import expected_ids
from ipc.client import client_address
from tests.system.harness import ROOT, engine, sim_toml


def test_a_client_written_from_the_specification_alone():
    source = (ROOT / "tests/ipc/other_client.py").read_text()
    assert not re.search(r"^\s*(from|import) (ipc|engine|msgspec)\b", source, re.M)
    with engine(sim_toml(step_ms=5)) as running:
        running.wait_ready()
        ended = subprocess.run(
            [
                sys.executable,
                "tests/ipc/other_client.py",
                client_address(running.run_dir),
                "sim",
                "hello",
                "--seed",
                "4",
            ],
            cwd=ROOT,
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr.decode()
        ids = expected_ids("sim-1", list(b"hello"), 4, 0, 257, 32)
        text = bytes(id for id in ids if id < 256).decode("utf-8", "replace")
        assert ended.stdout.decode() == text + "\n"
