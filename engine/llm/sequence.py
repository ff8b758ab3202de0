"""Owns a sequence: token ids being extended inside a worker, and the legal moves of its state.

Knows no block pool and no budget. `scheduler.commit` is the only writer of ids and state; `schedule` reserves.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


def advance(state: SequenceState, to: SequenceState) -> SequenceState:
    """The next state. Raises ValueError when the table has no such move."""
    if to not in TRANSITIONS[state]:
        raise ValueError(f"a sequence cannot go from {state.value} to {to.value}")
    return to


class FinishReason(StrEnum):
    STOP = "stop"  # end of text, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    FAILED = "failed"  # the model gave no token


@dataclass(slots=True, frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing.

    Repetition counts prompt and output, presence and frequency the output alone; `logit_bias` is (id, added) pairs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt + output. Positions below `num_computed` have their KV written, or will have by the steps
    in flight; `num_pending` tokens were sampled by steps in flight whose result is not known yet (0 or 1).

    With `max_tokens` 0 the prompt is computed and nothing is sampled. `num_logprobs` likeliest tokens are told of each
    token, None: nothing is; `is_scored` tells the same of the prompt. A request has `choice` 0 .. n, one sequence each.
    """

    request: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    attempt: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    namespace: bytes = b""
    sampling: Sampling | None = None
    num_logprobs: int | None = None
    is_scored: bool = False
    state: SequenceState = SequenceState.WAITING
    arrival: int = 0
    seat: int = -1
    num_computed: int = 0
    num_ever_computed: int = 0  # as far as it has been, before what it lost by preemption
    num_pending: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    num_preempted: int = 0
    was_admitted: bool = False
    reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    # Chained keys of this sequence's full blocks, computed as far as they were needed: block i -> keys[i].
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0  # blocks of the table that the prefix cache knows under keys[i]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def banned_ids(self, num_output_tokens: int) -> frozenset[int]:
        """Ids that must not follow so many tokens of output: what ends a text, while it is under `min_tokens`."""
        if num_output_tokens >= self.min_tokens:
            return frozenset()
        return self.stop_ids if self.ignore_eos else self.stop_ids | self.eos_ids

    def move(self, to: SequenceState) -> None:
        """Change the state. Raises ValueError for an illegal move."""
        self.state = advance(self.state, to)
