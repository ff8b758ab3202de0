"""aiperf: a short streamed chat profile; no errors in its report, and the engine's metrics are in it."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shared import arguments, equal, expect, fail, report

NUM_REQUESTS, OUTPUT_TOKENS = 12, 8
# What its dashboards and its analysis of a server are made of.
SCRAPED = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
}


def profiled(told: Any, where: Path) -> dict[str, Any]:
    """One run; its JSON report."""
    options = {
        "--model": told.model,
        "--url": told.url,
        "--endpoint-type": "chat",
        "--tokenizer": told.folder,
        "--request-count": str(NUM_REQUESTS),
        "--concurrency": "2",
        "--isl": "48",
        "--osl": str(OUTPUT_TOKENS),
        "--extra-inputs": "ignore_eos:true",
        "--num-dataset-entries": "8",
        "--random-seed": "1",
        "--artifact-dir": str(where),
        "--ui-type": "none",
    }
    switches = ["--streaming", "--use-server-token-count", "--per-chunk-usage", "--no-gpu-telemetry"]
    flags = [part for pair in options.items() for part in pair]
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", *switches, *flags]
    # Told to be offline it looks for the folder's path in the hub's cache; a folder needs no network either way.
    variables = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        fail(f"aiperf exits {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(next(where.rglob("profile_export_aiperf.json")).read_text()))


def tokens_scraped(path: Path, model: str) -> float:
    """Tokens of the model's answers by the engine's own count, as aiperf saw it grow."""
    told = json.loads(path.read_text())
    equal(told["summary"]["endpoints_successful"], told["summary"]["endpoints_configured"], "metrics scraped")
    expect(set(told["metrics"]) >= SCRAPED, "metrics are missing", SCRAPED - set(told["metrics"]))
    series = told["metrics"]["vllm:generation_tokens"]["series"]
    return float(sum(each["stats"]["total"] for each in series if each["labels"]["model_name"] == model))


def main() -> None:
    """All of it."""
    told = arguments("folder")
    where = Path("artifacts").resolve()
    made = profiled(told, where)
    equal(made["error_summary"], [], "errors")
    equal((made["is_complete"], made["was_cancelled"]), (True, False), "how it ended")
    equal(made["request_error_rate"]["avg"], 0.0, "share of errors")
    equal(made["completed_request_count"]["avg"], float(NUM_REQUESTS), "completed requests")
    equal(made["total_osl"]["avg"], float(NUM_REQUESTS * OUTPUT_TOKENS), "output tokens")
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        expect(made[name]["avg"] > 0, f"{name} is none", made[name])
    equal(tokens_scraped(where / "server_metrics_export.json", told.model), made["total_osl"]["avg"], "tokens scraped")
    report(version=version("aiperf"), ttft_ms=made["time_to_first_token"]["avg"], errors=made["error_summary"])


main()
