"""Where values come from, what a wrong one is told, and that the reference file tells the truth."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from engine.config import (
    Config,
    ConfigError,
    applies,
    changes,
    config_hash,
    leaves,
    load,
    load_with_sources,
    schema,
)

ROOT = Path(__file__).resolve().parents[1]
ONE = '[[deployment]]\nroute = "a.b"\nrunner = "sim"\n'


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "engine.toml"
        path.write_text(text)
        return str(path)

    return write


def test_flag_over_environment_over_file_over_default(file):
    path = file("[front]\nscan_max = 7\nage_step_s = 2\nheartbeat_s = 3\n" + ONE)
    environment = {"ENGINE_FRONT_SCAN_MAX": "8", "ENGINE_FRONT_AGE_STEP_S": "9", "ENGINE_RUN_DIR": "/tmp/x"}
    config, sources = load_with_sources(path, ["front.scan_max=5"], environment)
    assert (config.front.scan_max, config.front.age_step_s, config.front.heartbeat_s) == (5, 9.0, 3.0)
    assert config.front.sessions_max == 4096
    assert config.engine.run_dir == "/tmp/x"
    assert [sources.get(f"front.{key}") for key in ("scan_max", "age_step_s", "heartbeat_s", "sessions_max")] == [
        "flag",
        "environment",
        "file",
        None,
    ]


@pytest.mark.parametrize("name", ["deployment.a.b.llm.block_size", "deployment.0.llm.block_size"])
def test_a_deployment_is_set_by_route_or_by_number(file, name: str):
    assert load(file(ONE), [f"{name}=32"], {}).deployment[0].llm.block_size == 32


@pytest.mark.parametrize(
    ("text", "field", "told"),
    [
        ("", "deployment", "is missing"),
        ("[[deployment]]\n", "deployment[0].route", "is missing"),
        (ONE + "[deployment.llm]\nblock_sise = 1", "deployment[0].llm.block_sise", "did you mean block_size"),
        (ONE + "[deployment.llm]\nblock_size = 0", "deployment[0].llm.block_size", ">= 1"),
        (ONE + '[deployment.llm]\nblock_size = "16"', "deployment[0].llm.block_size", "got `str`"),
        ("[fornt]\nx = 1\n" + ONE, "fornt", "did you mean front"),
        ("[front]\nscan_max = 9999\n" + ONE, "front.scan_max", "<= 1024"),
        (ONE + ONE, "deployment[1].route", "a second deployment"),
        ('[[deployment]]\nroute = "a"\nrunner = "tensor"', "deployment[0].runner", "not built yet"),
        ('[[deployment]]\nroute = "a"\n', "deployment[0].model", "is missing"),
        (ONE + 'model = "x"', "deployment[0].model", "not for the fake model"),
        (ONE + "[deployment.llm]\nnum_blocks = 2", "deployment[0].llm.max_model_len", "num_blocks * block_size = 32"),
        ('[[deployment]]\nroute = "a b"', "deployment[0].route", "regex"),
        (f'[engine]\nrun_dir = "/{"x" * 120}"\n' + ONE, "engine.run_dir", "107"),
        (ONE + "[deployment", "", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(file, text: str, field: str, told: str):
    with pytest.raises(ConfigError) as caught:
        load(file(text), [], {})
    assert caught.value.field == field
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "environment", "told"),
    [
        (["front.scan_max"], {}, "section.key=value"),
        (["deployment.nowhere.replicas=2"], {}, "no such deployment"),
        (["front.scan_mx=2"], {}, "did you mean scan_max"),
        (["front.scan_max.deeper=2"], {}, "table"),
        ([], {"ENGINE_FRONT_SCANMAX": "1"}, "did you mean ENGINE_FRONT_SCAN_MAX"),
        ([], {"ENGINE_FRONT_SCAN_MAX": "many"}, "front.scan_max"),
    ],
)
def test_wrong_flags_and_variables(file, sets: list[str], environment: dict[str, str], told: str):
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(file("[front]\nscan_max = 3\n" + ONE), sets, environment)


def test_other_variables_are_left_alone(file):
    load(file(ONE), [], {"ENGINE_CHILD_TOKEN": "x", "ENGINE_PYTHON": "y", "ENGINE_TEST_OPTIMIZE": "1", "PATH": "/"})


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"/nowhere/engine\.toml"):
        load("/nowhere/engine.toml", [], {})


def test_changes_say_when_they_apply(file):
    old = load(file(ONE), [], {})
    new = load(
        file(ONE), ["deployment.0.queue.max_queued=3", "deployment.0.llm.num_blocks=9999", "engine.log_level=debug"], {}
    )
    assert changes(old, new) == [
        ("deployment[0].llm.num_blocks", "replica"),
        ("deployment[0].queue.max_queued", "live"),
        ("engine.log_level", "engine"),
    ]
    assert changes(old, old) == []
    two = load(file(ONE + ONE.replace("a.b", "c")), [], {})
    assert changes(old, two) == [("deployment", "engine")]


def test_the_hash_changes_with_any_value(file):
    old = load(file(ONE), [], {"ENGINE_RUN_DIR": "/tmp/x"})
    assert config_hash(old) == config_hash(load(file(ONE), [], {"ENGINE_RUN_DIR": "/tmp/x"}))
    assert config_hash(old) != config_hash(load(file(ONE), ["front.scan_max=33"], {"ENGINE_RUN_DIR": "/tmp/x"}))


def test_the_reference_names_every_setting_once_with_its_default_and_its_mark():
    text = (ROOT / "configs/full.toml").read_text()
    config = load(str(ROOT / "configs/full.toml"), [], {})
    default = msgspec.convert({"deployment": [{"route": "smollm2"}]}, Config)
    places = {"engine.run_dir", "engine.cache_dir", "deployment[0].model"}  # of this machine, and what has no default
    assert {path: value for path, value in leaves(config).items() if path not in places} == {
        path: value for path, value in leaves(default).items() if path not in places
    }
    marks, table = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]").replace("deployment", "deployment[0]")
        elif found := re.match(r"(\w+) = .*# (live|replica|engine): \w", line):
            path = f"{table}.{found[1]}"
            assert path not in marks
            marks[path] = found[2]
    assert marks == {path: applies(path) for path in leaves(default)}


def test_every_shipped_configuration_is_right():
    for path in (ROOT / "configs").glob("*.toml"):
        load(str(path), [], {})


def test_the_schema_describes_every_setting():
    definitions = json.loads(msgspec.json.encode(schema()))["$defs"]
    for name in ("Engine", "Front", "Llm", "Sim", "Queue", "Restart"):
        for key, described in definitions[name]["properties"].items():
            assert described.get("description"), f"{name}.{key}"
            assert described["applies"] in {"live", "replica", "engine"}
