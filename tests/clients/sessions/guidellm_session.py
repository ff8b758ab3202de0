"""guidellm: a short benchmark of synthetic prompts, chat and plain, streamed and whole: every request is successful."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shared import arguments, equal, expect, fail, report

NUM_REQUESTS = 12
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 8


def benchmarked(url: str, model: str, tokenizer: str, request_format: str, stream: bool) -> dict[str, Any]:
    """One run; its JSON report."""
    path = Path(f"report{request_format.replace('/', '-')}-{stream}.json").resolve()
    backend = {"kind": "openai_http", "target": url, "model": model, "request_format": request_format, "stream": stream}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    options = {
        "backend": backend,
        "tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
        "data": data,
        "profile": {"kind": "concurrent", "streams": [4]},
        "constraint": {"kind": "max_requests", "count": NUM_REQUESTS},
        "output": {"kind": "json", "path": str(path)},
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
    command = [str(Path(sys.executable).parent / "guidellm"), "run", *flags, "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        fail(f"guidellm exits {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(path.read_text()))


def totals(told: dict[str, Any]) -> dict[str, int]:
    """How the requests of a report ended."""
    equal(len(told["benchmarks"]), 1, "benchmarks")
    return dict(told["benchmarks"][0]["metrics"]["request_totals"])


def main() -> None:
    """Every way."""
    told = arguments("folder")
    seen = {}
    for request_format in ("/v1/chat/completions", "/v1/completions"):
        for stream in (True, False):
            made = benchmarked(told.url, told.model, told.folder, request_format, stream)
            name = f"{request_format} {'streamed' if stream else 'whole'}"
            seen[name] = counts = totals(made)
            equal(counts["successful"], NUM_REQUESTS, f"successful of {name}")
            equal((counts["errored"], counts["incomplete"]), (0, 0), f"errored and incomplete of {name}")
            requests = made["benchmarks"][0]["requests"]["successful"]
            outputs = [each["output_metrics"]["text_tokens"] for each in requests]
            expect(all(0 < each <= OUTPUT_TOKENS for each in outputs), f"output tokens of {name}", outputs)
    report(version=version("guidellm"), totals=seen)


main()
