"""What a person at a terminal gets: text, JSON alone on stdout, and the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--version"], 0, "0.1.0"),
        (["--help"], 0, "serve"),
        ([], 64, "Usage"),
        (["bogus"], 64, "No such command"),
        (["status", "--no-such-option"], 64, "No such option"),
        (["serve", "/nowhere.toml"], 78, "/nowhere.toml"),
        (["config", "check", "configs/full.toml"], 0, "ok: configs/full.toml"),
        (["config", "check", "configs/sim.toml", "--set", "front.scan_max=0"], 78, "front.scan_max"),
        (["wait", "NONSENSE", "--timeout", "0.1"], 64, "NONSENSE"),
        (["status", "--run-dir", "/nowhere"], 69, "no engine answers"),
        (["models", "--run-dir", "/nowhere"], 69, "is an engine running there"),
    ],
)
def test_commands(arguments: list[str], code: int, told: str):
    ended = run(*arguments)
    assert ended.returncode == code, ended
    assert told in (ended.stdout if code == 0 else ended.stderr + ended.stdout)
    assert "Traceback" not in ended.stderr


def test_json_stands_alone_on_stdout():
    assert json.loads(run("config", "print", "configs/sim.toml", "--json").stdout)["deployment"][0]["route"] == "sim"
    assert "$defs" in json.loads(run("config", "schema").stdout)
    machines = json.loads(run("states", "--json").stdout)
    assert machines["sequence"] == {
        "waiting": ["finished", "running"],
        "running": ["finished", "waiting"],
        "finished": [],
    }
    assert set(machines) == {"request", "sequence", "replica"}


def test_print_says_where_each_value_comes_from():
    shown = run("config", "print", "configs/sim.toml", "--set", "front.scan_max=7", ENGINE_LOG_LEVEL="debug").stdout
    (line,) = [each for each in shown.splitlines() if each.startswith("front.scan_max ")]
    assert line.split() == ["front.scan_max", "7", "flag", "engine"]
    (line,) = [each for each in shown.splitlines() if each.startswith("engine.log_level ")]
    assert line.split() == ["engine.log_level", '"debug"', "environment", "engine"]


def test_the_doctor_finds_this_machine_fit(tmp_path: Path):
    ended = run("doctor", "--json", "--run-dir", str(tmp_path / "run"))
    findings = {each["name"]: each for each in json.loads(ended.stdout)}
    assert ended.returncode == 0, findings
    assert {"python", "libzmq", "kernel", "run_dir", "cores", "memory", "open files", "gpu"} <= set(findings)
    ended = run("doctor", "--run-dir", "/" + "x" * 130)
    assert ended.returncode == 69
    assert "-> choose a run_dir" in ended.stdout


def test_a_closed_pipe_is_no_error():
    ended = subprocess.run(
        f"{sys.executable} -m engine.cli config schema | head -1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
