"""Third-party clients, each in its own environment, against a real engine with a tiny model and the fake one."""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import VERSIONS, Environment, NotInstalledError, made, plain
from tests.models_tiny import write_folder
from tests.system.harness import EngineProcess, engine, llm_toml, sim_toml, until
from tests.system.http_calls import DOOR, get

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SESSION_S = 600.0
CONTEXT = 1024
KEY = "sk-session"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, read by the engine and, for its tokenizer, by the clients."""
    path = write_folder(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=CONTEXT)
    told = json.loads((path / "tokenizer_config.json").read_text())
    told |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    return path


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[EngineProcess]:
    """tiny: a real decoder with a template. sim: the fake model."""
    with engine(sim_toml(step_ms=2.0) + llm_toml("tiny", folder, CONTEXT, num_blocks=1024), **DOOR) as made_engine:
        made_engine.wait_ready(120.0)
        until(lambda: get(made_engine, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made_engine


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The fake model behind a key, with one seat and one place to wait."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(f'[[key]]\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n')
    toml = sim_toml(seats=1, step_ms=5.0, queue="max_queued = 1", restart="backoff_s = 0.0\nintensity = 100")
    toml += f'[http]\napi_keys_file = "{path}"\nkeepalive_s = 0.2\n'
    with engine(toml, **DOOR) as made_engine:
        made_engine.wait_ready()
        until(lambda: get(made_engine, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made_engine


def environment(name: str) -> Environment:
    """A client's environment; the test is skipped where it cannot be made."""
    try:
        return made(name)
    except NotInstalledError as error:
        pytest.skip(f"{name} cannot be installed here: {error}")


def told_by(output: str, name: str) -> dict[str, Any]:
    """What a session's last line says."""
    lines = output.strip().splitlines()
    assert lines, "the session printed nothing"
    print(f"{name}: {lines[-1]}")
    return dict(json.loads(lines[-1]))


def session(client: Environment, directory: Path, script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run a session to its end, which is a good one, and return what it told."""
    command = client.command(script, *arguments)
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=directory,
        env=plain(HF_HOME=str(directory / "hf"), **variables),
        capture_output=True,
        text=True,
        timeout=SESSION_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    took_s = time.monotonic() - started
    return told_by(done.stdout, f"{client.name} {client.version}, {script}, {took_s:.1f} s")


def test_openai(running: EngineProcess, tmp_path: Path):
    client = environment("openai")
    told = session(client, tmp_path, "openai_session.py", running.url, "tiny", "--sim", "sim")
    assert told["version"] == client.version
    assert told["text"]
    assert told["at_once"] == 16
    assert told["responses"] == "served"
    assert told["errors"] == [
        "NotFoundError model_not_found",
        "BadRequestError context_length_exceeded",
        *["BadRequestError invalid"] * 3,
    ]


@pytest.mark.parametrize("way", ["keys", "full"])
def test_openai_is_refused(guarded: EngineProcess, tmp_path: Path, way: str):
    until(lambda: guarded.replicas()[0].num_in_flight == 0, what="nothing runs")
    told = session(environment("openai"), tmp_path, "openai_refused.py", guarded.url, "sim", "--key", KEY, "--way", way)
    assert [status for status, _ in told["answers"]] == ([401] if way == "keys" else [503, 200])


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_openai_loses_its_only_worker(guarded: EngineProcess, tmp_path: Path, way: str):
    client = environment("openai")
    guarded.wait_ready()
    until(lambda: guarded.replicas()[0].num_in_flight == 0, what="nothing runs")
    command = client.command("openai_refused.py", guarded.url, "sim", "--key", KEY, "--way", way)
    with subprocess.Popen(
        command, cwd=tmp_path, env=plain(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running_session:
        try:
            until(lambda: guarded.replicas()[0].num_running == 1, 60.0, "its request runs")
            os.kill(guarded.replicas()[0].pid, signal.SIGKILL)
            output, _ = running_session.communicate(timeout=SESSION_S)
        finally:
            running_session.kill()
    assert running_session.returncode == 0, output
    told = told_by(output, f"{client.name} {client.version}, {way}")
    if way == "whole":
        assert [status for status, _ in told["answers"]] == [503, 200]


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("langchain-openai", "langchain_session.py"),
        ("litellm", "litellm_session.py"),
        ("ai", "ai_session.mjs"),
    ],
)
def test_chats_and_completions_of(running: EngineProcess, tmp_path: Path, name: str, script: str):
    told = session(environment(name), tmp_path, script, running.url, "tiny")
    assert told["version"] == VERSIONS[name]["version"]
    assert told["text"]


def test_lm_eval_scores_as_its_own_model_does(running: EngineProcess, folder: Path, tmp_path: Path):
    client = environment("lm-eval")
    told = session(client, tmp_path, "lm_eval_session.py", running.url, "tiny", "--folder", str(folder))
    assert told["version"] == client.version
    assert told["num_likelihoods"] == 28
    assert told["apart"] < 1e-3


@pytest.mark.parametrize(("name", "script"), [("guidellm", "guidellm_session.py"), ("aiperf", "aiperf_session.py")])
def test_a_benchmark_of(running: EngineProcess, folder: Path, tmp_path: Path, name: str, script: str):
    client = environment(name)
    told = session(client, tmp_path, script, running.url, "tiny", "--folder", str(folder))
    assert told["version"] == client.version
