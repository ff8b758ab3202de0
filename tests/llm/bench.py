"""Owns a worker without processes: the real scheduler, the real rows, the real fake model, driven by hand.

Knows no socket. Used by the scheduler's and the equivalence tests.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.llm.batch import rows
from engine.llm.blocks import BlockPool
from engine.llm.runner import Handle
from engine.llm.scheduler import Emission, Limits, Scheduler, Step
from engine.llm.sequence import Sequence
from engine.sim.model import SimOptions, SimRunner, expected_ids


class StillClock:
    """Time that does not pass: the fake model's steps are ready at once."""

    def now(self) -> float:
        return 0.0


def sequence(number: int, prompt: list[int], max_tokens: int = 8, **options: object) -> Sequence:
    options.setdefault("ignore_eos", True)
    return Sequence(number, list(prompt), len(prompt), max_tokens, seed=number, **options)  # type: ignore[arg-type]


def oracle(made: Sequence, count: int, vocab_size: int = 257) -> list[int]:
    """What the hash chain says this sequence must have put out."""
    prompt = made.token_ids[: made.num_prompt_tokens]
    return list(expected_ids("sim-1", prompt, made.seed, made.choice, vocab_size, count))


@dataclass
class Bench:
    """`depth` steps are launched before the oldest is committed, as the worker's loop does."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_batched_tokens: int = 32
    max_model_len: int = 200
    is_cached: bool = True
    depth: int = 1
    key_bytes: int = 16
    scheduler: Scheduler = field(init=False)
    runner: SimRunner = field(init=False)
    flights: deque[tuple[Step, Handle]] = field(default_factory=deque)
    emissions: list[Emission] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            Limits(self.max_num_seqs, self.max_batched_tokens, self.max_model_len),
            BlockPool(self.num_blocks, self.block_size, self.is_cached, self.key_bytes),
        )
        options = SimOptions(
            num_blocks=self.num_blocks, block_size=self.block_size, max_num_seqs=self.max_num_seqs, is_async=False
        )
        self.runner = SimRunner(options, clock=StillClock(), sleep=lambda _: None)

    def launch(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        assert sum(chunk.length for chunk in step.chunks) == step.num_tokens <= self.max_batched_tokens
        self.flights.append((step, self.runner.launch(rows(step))))
        self.num_steps += 1
        return True

    def commit(self) -> list[Emission]:
        step, handle = self.flights.popleft()
        made = self.scheduler.commit(step, handle.wait())
        self.emissions += made
        return made

    def turn(self) -> bool:
        """One turn of the loop; False when nothing is left to do."""
        while len(self.flights) < self.depth and self.launch():
            pass
        if not self.flights:
            return False
        self.commit()
        self.scheduler.audit()
        return True

    def run(self, turns_max: int = 10_000) -> None:
        for _ in range(turns_max):
            if not self.turn():
                return
        raise AssertionError(f"not done after {turns_max} turns: {self.scheduler.statistics()}")

    def ids(self, number: int) -> list[int]:
        return [id for each in self.emissions if each.sequence.request == number for id in each.ids]

    def is_back_to_base(self) -> bool:
        told = self.scheduler.statistics()
        return (told.num_running, told.num_waiting, told.num_free_blocks) == (0, 0, self.num_blocks)
