"""Owns a step of a real decoder: rows to tensors, forward, one token per sampled row, log probabilities where wanted.

Knows rows, not sequences, and no socket. Implements `Runner` on torch: a launch computes, and its handle is ready at
once. Called by the worker's loop.
"""

from typing import Final

import torch

from engine.attention.reference import Span, plan
from engine.llm.runner import FAILED_TOKEN, PENDING_TOKEN, Logprob, Row, Scores
from engine.llm.sampler import Logits, NonFiniteLogits, adjust, check, sample, score, uniform
from engine.models.decoder import Decoder

LOGITS_ROWS_MAX: Final = 64  # rows whose logits exist at once: 12 MiB for a vocabulary of 49,152


class Done:
    """A step that was computed inside its launch."""

    ready_at: float | None = None

    def __init__(self, ids: list[int], scores: Scores | None) -> None:
        self._ids = ids
        self.scores = scores

    def poll(self) -> bool:
        return True

    def wait(self) -> list[int]:
        return self._ids


class ModelRunner:
    """Runs a decoder on blocks of `block_size` positions. Ids from `vocab_size` on are never sampled."""

    def __init__(self, decoder: Decoder, block_size: int, num_seats: int, vocab_size: int) -> None:
        self.decoder = decoder
        self._block_size = block_size
        self._device = decoder.device
        self._vocab_size = min(vocab_size, decoder.config.vocab_size)
        self._sampled = [0] * num_seats

    def launch(self, rows: list[Row]) -> Done:
        """Compute one step."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []  # rows of the step whose logits are looked at
        size = self._block_size
        for row in rows:
            start, length, table = len(token_ids), len(row.token_ids), row.block_table
            token_ids += row.token_ids
            if row.token_ids[-1] == PENDING_TOKEN:
                token_ids[-1] = self._sampled[row.seat]
            places = range(row.start, row.start + length)
            positions += places
            slots += [table[position // size] * size + position % size for position in places]
            spans.append(Span(start, length, row.start, table))
            wanted += range(start, start + len(row.targets))
            if row.is_sampled:
                wanted.append(start + length - 1)
        hidden = self._forward(token_ids, positions, slots, spans, wanted)
        return self._read(rows, hidden)

    def _forward(
        self, token_ids: list[int], positions: list[int], slots: list[int], spans: list[Span], wanted: list[int]
    ) -> torch.Tensor:
        decoder, device = self.decoder, self._device
        planned = plan(spans, self._block_size, decoder.zero_slot, decoder.heads_per_kv, device)
        ids, at, to, last = (
            torch.tensor(values, dtype=torch.long, device=device) for values in (token_ids, positions, slots, wanted)
        )
        return decoder.forward(ids, at, to, planned, last)

    def _read(self, rows: list[Row], hidden: torch.Tensor) -> Done:
        """Tokens and log probabilities from the hidden states of the wanted rows, a bounded number at a time."""
        asks: list[tuple[int, int]] = []  # per wanted row: its row, and which target; -1 is the sampled token
        for index, row in enumerate(rows):
            asks += [(index, target) for target in range(len(row.targets))]
            if row.is_sampled:
                asks.append((index, -1))
        ids: list[int] = []
        scores = Scores()
        for at in range(0, len(asks), LOGITS_ROWS_MAX):
            lines = self.decoder.logits(hidden[at : at + LOGITS_ROWS_MAX]).cpu().numpy()[:, : self._vocab_size]
            for line, (index, target) in zip(lines, asks[at : at + LOGITS_ROWS_MAX], strict=True):
                if target < 0:
                    ids.append(self._choose(rows[index], index, line, scores))
                else:
                    scores.prompt.setdefault(index, []).append(_score(line, rows[index], target))
        return Done(ids, scores if scores.sampled or scores.prompt else None)

    def _choose(self, row: Row, index: int, line: Logits, scores: Scores) -> int:
        position = row.start + len(row.token_ids)
        history = row.history
        if row.token_ids[-1] == PENDING_TOKEN:
            history = [*history, self._sampled[row.seat]]
        try:
            check(line)
            adjusted = adjust(line, row.sampling, history, row.num_prompt_tokens, row.banned)
            token = sample(adjusted, row.sampling, uniform(row.seed, row.choice, position))
        except NonFiniteLogits:
            return FAILED_TOKEN
        self._sampled[row.seat] = token
        if row.num_logprobs is not None:
            scores.sampled[index] = score(line, token, row.num_logprobs)
        return token

    def warm(self, num_tokens: int) -> bool:
        """Run the largest step, then ask whether a row's bits depend on its company; True when they do not.

        Uses the first blocks and clears them; call it before the first step. The probe runs one token alone, at the
        head of 2, 3, 4, 17 and `num_tokens` rows and at their tail, and the end of a prompt alone and as part of a
        chunk: the logits must be the same bits.
        """
        num_blocks = self.decoder.zero_slot // self._block_size
        rest = self._filling(num_tokens - 1, num_blocks - 1)
        most = min(num_tokens, num_blocks)
        companies: list[tuple[list[int], list[int]]] = [([], [1] * count) for count in (1, 2, 3, 16) if count < most]
        companies += [(after, before) for before, after in companies[-1:]]
        if rest:
            companies += [([], rest), (rest, [])]
        reference = self._probe([], [])
        exact = all(torch.equal(reference, self._probe(before, after)) for before, after in companies)
        exact = exact and self._is_chunking_exact(sum(self._filling(num_tokens, num_blocks)[:1]))
        num_used = (min(num_tokens, num_blocks) + 1) * self._block_size
        self.decoder.k_cache[:, :, :num_used] = 0
        self.decoder.v_cache[:, :, :num_used] = 0
        return exact

    def _filling(self, num_tokens: int, num_blocks: int) -> list[int]:
        """Lengths of sequences, as long as the context, that fill a step of so many tokens and blocks."""
        lengths: list[int] = []
        while num_tokens > 0 and num_blocks > 0:
            length = min(num_tokens, num_blocks * self._block_size, self.decoder.context)
            lengths.append(length)
            num_tokens -= length
            num_blocks -= (length + self._block_size - 1) // self._block_size
        return lengths

    def _probe(self, before: list[int], after: list[int]) -> torch.Tensor:
        """Logits of token 1 at position 0, between other sequences of these lengths."""
        chunks: list[tuple[list[int], int, list[int]]] = []
        block = 0
        for length in [*before, 0, *after]:
            ids = [2 + index % max(1, self._vocab_size - 2) for index in range(length)] or [1]
            num_blocks = (len(ids) + self._block_size - 1) // self._block_size
            chunks.append((ids, 0, list(range(block, block + num_blocks))))
            block += num_blocks
        return self._logits(chunks, sum(before))

    def _is_chunking_exact(self, length: int) -> bool:
        """Whether the last token of a prompt has the same logits computed with the rest and after it."""
        ids = [1 + index % max(1, self._vocab_size - 1) for index in range(length)]
        table = list(range((length + self._block_size - 1) // self._block_size))
        whole = self._logits([(ids, 0, table)], length - 1)
        if length > 1:
            self._logits([(ids[:-1], 0, table)], 0)
        return torch.equal(whole, self._logits([(ids[-1:], length - 1, table)], 0))

    def _logits(self, chunks: list[tuple[list[int], int, list[int]]], row: int) -> torch.Tensor:
        """Logits of one row of a step of chunks (ids, first position, block table)."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        for ids, first, table in chunks:
            spans.append(Span(len(token_ids), len(ids), first, table))
            token_ids += ids
            places = range(first, first + len(ids))
            positions += places
            slots += [table[at // self._block_size] * self._block_size + at % self._block_size for at in places]
        return self.decoder.logits(self._forward(token_ids, positions, slots, spans, [row]))[0]


def _score(line: Logits, row: Row, target: int) -> Logprob:
    """Of a token of the prompt. A row that cannot be scored tells NaN, and its request fails."""
    try:
        check(line)
    except NonFiniteLogits:
        return Logprob(row.targets[target], float("nan"), [])
    return score(line, row.targets[target], row.num_logprobs or 0)
