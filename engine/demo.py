"""Owns `engine demo`: start an engine with a real model, ask it several things at once, show the answers and figures.

Knows the command line and the client, nothing inside. Exits with 1 when the model does not know the capital of France.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.operate import render_table, wait
from ipc.client import AsyncClient, client_address
from ipc.errors import Code, EngineError
from ipc.messages import Delta, Finished, Message, StatusReport
from ipc.streams import raise_unless_finished

READY_S: Final = 900.0  # the first start fetches the model
FACT: Final = "The capital of France is"
QUESTIONS: Final = ["Why is the sky blue?", "Write one sentence about the sea.", "What is two plus two?"]


@dataclass(slots=True)
class _Answer:
    name: str
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    text: str = ""


def run(config: str) -> int:
    """The whole show; returns the exit code. Everything it starts has ended when it returns."""
    with tempfile.TemporaryDirectory(prefix="engine-demo-") as directory:
        run_dir = str(Path(directory) / "run")
        log = Path(directory) / "log"
        print(f"starting an engine with {config}; the first time it fetches the model ...", flush=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine.cli", "serve", config],
                env={**os.environ, "ENGINE_RUN_DIR": run_dir, "ENGINE_HTTP_GATEWAYS": "0"},
                stdout=out,
                stderr=None if sys.stderr.isatty() else out,
            )
        try:
            report = wait(run_dir, lambda told: told.state in {"ready", "failed"}, READY_S)
            if report is None or report.state != "ready":
                raise EngineError(Code.UNAVAILABLE, _why(report, log))
            return asyncio.run(_show(run_dir, report))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _why(report: StatusReport | None, log: Path) -> str:
    reasons = [each.reason for each in report.replicas if each.reason] if report is not None else []
    return "the engine did not become ready: " + ("; ".join(reasons) or log.read_text(errors="replace")[-500:])


async def _show(run_dir: str, report: StatusReport) -> int:
    (replica,) = report.replicas
    route = report.routes[0].route
    exact = "row-exact" if replica.is_row_exact else "not row-exact"
    print(f"ready after {replica.ready_after_s:.1f} s: {route} on {', '.join(replica.devices)}, products {exact}\n")
    async with AsyncClient(client_address(run_dir), name="demo") as client:
        started = time.perf_counter()
        whole = await client.generate(route, FACT, max_tokens=8)
        print(f"whole:    {FACT}{whole.text.splitlines()[0] if whole.text else ''}")
        rows = [_Answer("whole", whole.usage.completion_tokens, 0.0, time.perf_counter() - started, whole.text)]
        print("streamed: ", end="", flush=True)
        rows.append(await _stream(client, route, "streamed", "Tell me a short story.", is_shown=True))
        print("\n\nthree at once:")
        peak: list[int] = [0]
        watching = asyncio.create_task(_watch(client, peak))
        tasks = [_stream(client, route, f"stream {number}", text) for number, text in enumerate(QUESTIONS, 1)]
        answers = await asyncio.gather(*tasks)
        watching.cancel()
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"  {question}\n    {' '.join(answer.text.split())}")
        rows += answers
    print()
    header = ["REQUEST", "TOKENS", "FIRST TOKEN", "TOKENS/S"]
    print(render_table(header, [[*_cells(each)] for each in rows]))
    print(f"largest batch: {max(peak)} sequences")
    if "Paris" not in whole.text:
        print(f"demo: {FACT!r} went on with {whole.text!r}, not with Paris", file=sys.stderr)
        return 1
    return 0


def _cells(answer: _Answer) -> list[str]:
    first = f"{answer.first_s * 1e3:.0f} ms" if answer.first_s else "-"
    rate = answer.tokens / answer.total_s if answer.total_s else 0.0
    return [answer.name, str(answer.tokens), first, f"{rate:.1f}"]


async def _stream(client: AsyncClient, route: str, name: str, text: str, is_shown: bool = False) -> _Answer:
    answer = _Answer(name)
    started = time.perf_counter()
    stream = await client.stream(route, "", messages=[Message("user", text)], max_tokens=48)
    async for event in stream:
        if isinstance(event, Delta | Finished):
            if event.ids and not answer.first_s:
                answer.first_s = time.perf_counter() - started
            answer.tokens += len(event.ids)
            answer.text += event.text
            if is_shown:
                print(event.text.replace("\n", " "), end="", flush=True)
        else:
            raise_unless_finished(event)
    answer.total_s = time.perf_counter() - started
    return answer


async def _watch(client: AsyncClient, peak: list[int]) -> None:
    """Looks until it is cancelled, and notes the number of running sequences."""
    while True:
        report = await client.status()
        peak += [each.num_running for each in report.replicas]
        await asyncio.sleep(0.05)
