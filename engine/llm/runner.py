"""Owns the plug between the worker's loop and whatever computes tokens: `Row`, `Handle`, `Runner`.

Knows no scheduler, no socket and no model. The worker's loop calls it; the fake model and the real ones implement it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine.llm.sequence import Sampling

# The last token of a row whose value the device still holds: it was sampled by a step whose result has not
# been read back yet. The runner takes it from what it last sampled for that seat.
PENDING_TOKEN: Final = -1
# Instead of an id: this row has none (no logit is finite, or one is not a number); its request fails, the others go on.
FAILED_TOKEN: Final = -2


@dataclass(slots=True)
class Row:
    """One chunk of one sequence, ready for a device.

    `token_ids` are the chunk's tokens at absolute positions start .. start + len(token_ids) (half-open); only the last
    may be PENDING_TOKEN. `block_table` maps position p to block `block_table[p // block_size]`; it covers the chunk and
    everything before it. The scheduler only ever appends to that list while the row is in flight. `history` is all of
    the sequence that is known, prompt and output; `banned` ids must not be sampled. `targets` are the prompt's tokens
    after each of this chunk's, where their log probabilities are wanted.
    """

    seat: int
    start: int
    token_ids: list[int]
    block_table: Seq[int]
    num_prompt_tokens: int
    seed: int
    choice: int
    is_sampled: bool
    sampling: Sampling | None = None
    history: Seq[int] = ()
    banned: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    targets: Seq[int] = ()


@dataclass(slots=True)
class Logprob:
    """One token's log probability in the raw distribution, and the likeliest tokens with theirs, best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Scores:
    """What a step tells beside its ids, by the row's place in it: of the sampled token, of the prompt's `targets`."""

    sampled: dict[int, Logprob] = field(default_factory=dict)
    prompt: dict[int, list[Logprob]] = field(default_factory=dict)


class Handle(Protocol):
    """One launched step. `ready_at` is when it will be done (monotonic seconds), None when nobody can tell.

    `scores` is there after `wait`, where a row asked for log probabilities.
    """

    ready_at: float | None
    scores: Scores | None

    def poll(self) -> bool:
        """True when `wait` would return at once. Changes nothing."""
        ...

    def wait(self) -> list[int]:
        """Block until the device is done; one token id per row with `is_sampled`, in row order. Call it once."""
        ...


class Runner(Protocol):
    """Turns rows into token ids. Steps run in launch order; a second launch may come before the first is waited for."""

    def launch(self, rows: list[Row]) -> Handle:
        """Start one step. Changes the KV cache at the rows' positions."""
        ...
