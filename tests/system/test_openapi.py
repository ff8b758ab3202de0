"""The OpenAPI document against a real engine: schemathesis finds no violation and no fault."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models_tiny import write
from tests.system.harness import ROOT, EngineProcess, engine, llm_toml, sim_toml, until
from tests.system.http_calls import DOOR, get


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("models")
    toml = (
        sim_toml(step_ms=0.5)
        + llm_toml("tiny", write(directory / "tiny.gguf"), max_model_len=64)
        + "[front]\nkept_max = 50\n"
    )
    with engine(toml, **DOOR) as made:
        made.wait_ready(120.0)
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


def aimed(running: EngineProcess) -> dict[str, Any]:
    """The document of this engine, with its routes as the only models, so that requests get further than a name."""
    document = get(running, "/openapi.json")[1]
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("required", []) and "object" not in schema["properties"]:
            schema["properties"]["model"] = {"enum": ["tiny", "sim"]}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in schema.get("properties", {}):
                schema["properties"][name] = {"type": "integer", "minimum": 1, "maximum": 8}
        if "deadline_ms" in schema.get("properties", {}):  # one that passes is a 504, and no fault
            schema["properties"]["deadline_ms"] = {"enum": [0, 60_000]}
    return document


def fuzz(running: EngineProcess, path: Path, *options: str) -> str:
    path.write_text(json.dumps(aimed(running)))
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "schemathesis"), "run", str(path), "--url", running.url),
            *("--continue-on-failure", "--no-color", "--warnings", "off", "--request-timeout", "20"),
            # Unknown and doubtful fields are tolerated on purpose: what is no JSON of ours need not be refused.
            *("--exclude-checks", "negative_data_rejection,positive_data_acceptance"),
            *options,
        ],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def healthy_after(running: EngineProcess) -> None:
    until(lambda: all(each.num_in_flight == 0 for each in running.replicas()), 20.0, "nothing runs")
    report = running.status()
    assert report is not None
    assert report.counters.internal_errors == 0
    assert [each.num_deaths for each in report.replicas] == [0, 0]


def test_schemathesis_finds_nothing(running: EngineProcess, tmp_path: Path):
    fuzz(
        running,
        tmp_path / "openapi.json",
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "10",
        "--seed",
        "1",
    )
    healthy_after(running)


@pytest.mark.slow
def test_schemathesis_finds_nothing_in_five_thousand(running: EngineProcess, tmp_path: Path):
    out = fuzz(running, tmp_path / "openapi.json", "--phases", "fuzzing,stateful", "--max-examples", "400")
    print(out[-1500:])
    healthy_after(running)


def test_the_document_names_every_route_and_no_other(running: EngineProcess):
    document = get(running, "/openapi.json")[1]
    assert document["openapi"] == "3.1.0"
    assert {"/v1/chat/completions", "/v1/responses/{id}/cancel", "/metrics"} <= set(document["paths"])
    assert ROOT.joinpath("engine/gateway/openapi.py").exists()
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            assert told["responses"]["200"]["content"], (method, path)
