"""The pieces of a deployment against what the engine is: settings, paths, names of figures, each tool's check."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cli import EXIT_CONFIG, EXIT_USAGE
from engine.config import Engine, Http, load
from tests.system.harness import ROOT, engine, sim_toml, until
from tests.system.http_calls import get, metric, post, send

DEPLOY = ROOT / "configs/deploy"
PROMETHEUS = DEPLOY / "prometheus"
UNIT = DEPLOY / "engine.service"
# What systemd 252 says of the unit is 1.7, most of it for having a network and devices; 10 is the worst.
EXPOSURE_MAX = 2.0
ANALYZE, PROMTOOL = shutil.which("systemd-analyze"), shutil.which("promtool")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed (Debian: systemd)")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
# Words of the query language are no names; those of ours begin with these.
NAME = re.compile(r"\b(?:engine_|vllm:)[a-z0-9_]+")
SELECTOR = re.compile(r"((?:engine_|vllm:)[a-z0-9_]+)\{([^}]*)\}")
# What Prometheus adds to each series, and what only a dashboard's reader chooses.
ADDED = {"instance", "job"}


def run(*command: str | Path | None) -> str:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# systemd.


def unit() -> dict[str, list[str]]:
    """Every value of a key, in order."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def rendered(tmp_path: Path) -> Path:
    """The unit with the paths of this checkout."""
    made = tmp_path / "engine.service"
    made.write_text(UNIT.read_text().replace("/opt/engine", str(ROOT)))
    return made


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_unit(rendered: Path):
    assert run(ANALYZE, "verify", "--man=no", rendered) == ""


@needs_systemd
def test_the_unit_exposes_little(rendered: Path):
    told = run(ANALYZE, "security", "--offline=true", "--no-pager", rendered)
    found = re.search(r"exposure level for engine.service: ([0-9.]+)", told)
    assert found is not None, told
    assert float(found[1]) <= EXPOSURE_MAX, told


def test_the_unit_says_what_the_engine_means():
    told = unit()
    assert told["RestartPreventExitStatus"] == [f"{EXIT_USAGE} {EXIT_CONFIG}"]
    assert float(told["TimeoutStopSec"][0]) > Engine().drain_s + Engine().stop_grace_s
    environment = dict(item.split("=", 1) for line in told["Environment"] for item in line.split())
    specifiers = {"%t": "/run", "%C": "/var/cache", "%d": "/run/credentials/engine.service"}
    for name, value in environment.items():
        for specifier, path in specifiers.items():
            value = value.replace(specifier, path)
        environment[name] = value
    config = load(str(ROOT / "configs/sim.toml"), [], environment)
    assert config.engine.run_dir == f"/run/{told['RuntimeDirectory'][0]}"
    assert told["RuntimeDirectoryMode"] == ["0700"]
    assert config.engine.cache_dir == f"/var/cache/{told['CacheDirectory'][0]}"
    credential = told["LoadCredential"][0].partition(":")[0]
    assert config.http.api_keys_file == f"/run/credentials/engine.service/{credential}"
    assert {name for name in environment if name.startswith("ENGINE_")} == {
        "ENGINE_RUN_DIR",
        "ENGINE_CACHE_DIR",
        "ENGINE_HTTP_API_KEYS_FILE",
    }
    assert told["ExecStart"] == ["/opt/engine/bin/engine serve /etc/engine/engine.toml"]


# Kubernetes.


def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_the_pod_ends_after_its_drain(tmp_path: Path):
    config = tmp_path / "engine.toml"
    config.write_text(manifests()["ConfigMap"]["data"]["engine.toml"])
    loaded = load(str(config), [], {})
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    found = re.fullmatch(r"sleep ([0-9]+); exec /opt/engine/bin/engine drain", command[-1])
    assert found is not None
    assert pod["terminationGracePeriodSeconds"] > int(found[1]) + loaded.engine.drain_s + loaded.engine.stop_grace_s
    assert loaded.engine.drain_s == Engine().drain_s
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["ENGINE_RUN_DIR"] == loaded.engine.run_dir
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {str(Path(path).parent) for path in (loaded.engine.run_dir, loaded.http.api_keys_file)} <= mounts
    assert loaded.engine.cache_dir in mounts
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_a_service_called_engine_would_set_a_variable_that_is_refused():
    """Kubernetes sets NAME_PORT for each service, which is a near miss of ours."""
    assert manifests()["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_service_finds_the_pods():
    service, deployment = manifests()["Service"]["spec"], manifests()["Deployment"]["spec"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert service["selector"].items() <= deployment["template"]["metadata"]["labels"].items()
    (container,) = deployment["template"]["spec"]["containers"]
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert container["ports"][0]["containerPort"] == Http().port


# Prometheus and Grafana.


def test_the_job_of_pods_is_well_formed_too():
    """It is a comment; its lines without the mark are a job."""
    text = (PROMETHEUS / "scrape.yml").read_text()
    lines = text[text.index("  # - job_name: engine-pods") :].splitlines()
    (job,) = yaml.safe_load("\n".join(line.removeprefix("  # ") for line in lines))
    assert job["job_name"] == "engine-pods"
    assert {each.get("replacement") for each in job["relabel_configs"] if each.get("target_label") == "job"} == {
        "engine"
    }


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "grafana.json").read_text()))


def expressions() -> list[str]:
    of_panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    of_variables = [each["definition"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    return [rule["expr"] for rule in rules()] + of_panels + of_variables


@needs_promtool
def test_prometheus_accepts_the_rules_and_the_jobs(tmp_path: Path):
    for path in PROMETHEUS.iterdir():
        shutil.copy(path, tmp_path)
    jobs = tmp_path / "scrape.yml"
    (tmp_path / "engine.key").write_text("x")
    jobs.write_text(jobs.read_text().replace("/etc/prometheus/engine.key", str(tmp_path / "engine.key")))
    assert "SUCCESS" in run(PROMTOOL, "check", "config", jobs)
    assert f"{len(rules())} rules found" in run(PROMTOOL, "check", "rules", tmp_path / "alerts.yml")


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_beside_it():
    assert "SUCCESS" in run(PROMTOOL, "test", "rules", PROMETHEUS / "alerts_test.yml")


def test_each_alert_is_tested_and_says_what_to_do():
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules()}
    assert len(fired) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert len(rule["annotations"]["summary"]) < 120
        assert len(rule["annotations"]["description"]) > 80


@pytest.fixture(scope="module")
def page() -> dict[str, set[str]]:
    """Names of samples on a real page, with the labels that they have; none where nothing was counted."""
    with engine(sim_toml(), ENGINE_HTTP_GATEWAYS="1") as running:
        running.wait_ready()
        until(lambda: get(running, "/readyz")[0] == 200, 10.0, "a ready door")
        for path in probe_paths():
            assert send(running, "GET", path)[0] == 200, path
        fields = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
        assert post(running, "/v1/completions", {"model": "sim", **fields})[0] == 200
        assert post(running, "/v1/completions", {"model": "nope", **fields})[0] == 404
        until(lambda: metric(running, "engine_http_requests_total", path="/v1/completions", status="404"))
        until(lambda: metric(running, "vllm:kv_cache_usage_perc") is not None)
        text = get(running, "/metrics")[1]
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + suffix] = set()
    for name, labels in re.findall(r"^([a-z][a-z0-9_:]*)(\{.*\})? \S+$", text, re.MULTILINE):
        found[name] = found.get(name, set()) | set(re.findall(r'([a-z_]+)="', labels))
    return found


def probe_paths() -> list[str]:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    paths = [str(container[probe]["httpGet"]["path"]) for probe in probes]
    assert paths == ["/startupz", "/livez", "/readyz"]
    return [*paths, manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]]


def test_every_name_and_label_that_is_asked_for_is_on_the_page(page: dict[str, set[str]]):
    names = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(names) > 25
    assert names <= page.keys()
    for expression in expressions():
        for name, selector in SELECTOR.findall(expression):
            asked = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector))
            assert asked <= page[name] | ADDED, expression
    for alert in rules():
        told = set(re.findall(r"\$labels\.([a-z_]+)", json.dumps(alert["annotations"])))
        own = set().union(*(page[name] for name in NAME.findall(alert["expr"])))
        assert told <= own | ADDED, alert["alert"]


def test_the_dashboard_is_whole():
    board = dashboard()
    assert board["uid"] == "engine"
    assert board["schemaVersion"] >= 39
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "instance", "route"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        assert all(target["expr"] and target["datasource"] == panel["datasource"] for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        assert 'instance=~"$instance"' in expression


@needs_promtool
def test_the_expressions_of_the_dashboard_are_right(tmp_path: Path):
    """Each as a rule of its own, so that promtool reads it."""
    made = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for number, target in enumerate(target for panel in dashboard()["panels"] for target in panel["targets"])
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    assert f"{len(made)} rules found" in run(PROMTOOL, "check", "rules", tmp_path / "panels.yml")


def test_no_file_is_left_out():
    """What is added here is looked at here."""
    found = {os.path.relpath(path, DEPLOY) for path in DEPLOY.rglob("*") if path.is_file()}
    assert found == {
        "engine.service",
        "sysusers.conf",
        "nginx.conf",
        "kubernetes.yaml",
        "grafana.json",
        "prometheus/scrape.yml",
        "prometheus/alerts.yml",
        "prometheus/alerts_test.yml",
    }
