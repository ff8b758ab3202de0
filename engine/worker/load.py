"""Owns the way from a deployment's configuration to a runner with its tokenizer, by name, imported late.

Knows no socket and no scheduler. Called by `worker/main.py`, which tells the health page what phase this is.
"""

import time
from collections.abc import Callable
from typing import Final

from engine.config import Deployment
from engine.llm.tokenizer import ByteTokenizer
from engine.worker.loaded import Loaded
from ipc.errors import Code, EngineError

SIM_BLOCKS: Final = 4096  # the fake model's cache is four bytes a position


def load(deployment: Deployment, replica: int, cache_dir: str, enter: Callable[[str], None]) -> Loaded:
    """Build and warm up the runner a deployment names; `replica` counts from 0 within it.

    `enter` is told the phase that begins: loading, then warming. Raises EngineError.
    """
    if deployment.runner == "sim":
        return _load_sim(deployment, replica)
    if deployment.runner == "llm":
        from engine.worker.load_llm import load_llm  # a worker imports only the runner it has

        return load_llm(deployment, cache_dir, enter)
    raise EngineError(Code.UNSUPPORTED, f"runner {deployment.runner} is not built", "runner")


def _load_sim(deployment: Deployment, replica: int) -> Loaded:
    from engine.sim.model import SimOptions, SimRunner  # a worker imports only the runner it has

    sim, llm = deployment.sim, deployment.llm
    speed = sim.speeds[replica % len(sim.speeds)] if sim.speeds else 1.0
    options = SimOptions(
        version=sim.version,
        vocab_size=sim.vocab_size,
        step_s=sim.step_ms / 1e3 / speed,
        token_s=sim.token_us / 1e6 / speed,
        seat_s=sim.seat_us / 1e6 / speed,
        is_async=sim.overlap,
        num_blocks=llm.num_blocks or max(SIM_BLOCKS, -(-llm.max_model_len // llm.block_size)),
        block_size=llm.block_size,
        max_num_seqs=llm.max_num_seqs,
    )
    if sim.exit_at_start:
        raise SystemExit(sim.exit_at_start)
    if sim.load_s:
        time.sleep(sim.load_s)  # the fake model pretends that its weights take this long
    runner = SimRunner(options)
    runner.warm(llm.max_batched_tokens)
    return Loaded(
        runner,
        ByteTokenizer(sim.vocab_size),
        sim.version,
        overlap=2 if sim.overlap else 1,
        has_logits=False,
        num_blocks=options.num_blocks,
    )
