"""The README's commands work as printed, but for the port: tests take a free one."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models_tiny import write
from tests.system.harness import ROOT, EngineProcess, engine, llm_toml, until
from tests.system.http_calls import DOOR, get

TEXT = (ROOT / "README.md").read_text()
CURLS = re.findall(r"^curl .*$", TEXT, re.M)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A tiny model under the README's name."""
    model = write(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with engine(llm_toml("smollm2", model), **DOOR) as made:
        made.wait_ready(120.0)
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


def test_there_are_curl_lines():
    assert len(CURLS) >= 6


@pytest.mark.parametrize("line", CURLS, ids=lambda line: re.findall(r":8000(\S+)", line)[0])
def test_a_curl_line(running: EngineProcess, line: str):
    line = line.replace("http://127.0.0.1:8000", running.url).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert '"error": {' not in done.stdout
    if "stream" in line:
        assert done.stdout.rstrip().endswith("data: [DONE]")
    elif ";" not in line:
        assert "error" not in json.loads(done.stdout) or json.loads(done.stdout)["error"] is None


def test_the_python_example(running: EngineProcess):
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"ENGINE_RUN_DIR": running.run_dir, "PATH": str(Path(sys.executable).parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Finished(" in done.stdout
