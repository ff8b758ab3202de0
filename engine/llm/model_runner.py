"""Owns a step of a real decoder: rows to tensors, forward, one token per sampled row.

Knows rows, not sequences, and no socket. Implements `Runner` on torch: on the CPU a launch computes, and its handle is
ready at once. Called by the worker's loop.
"""

import torch

from engine.attention.reference import TILE, Span
from engine.llm.runner import FAILED_TOKEN, PENDING_TOKEN, Row
from engine.llm.sampler import NonFiniteLogits, sample, uniform
from engine.models.decoder import Decoder


class Done:
    """A step that was computed inside its launch."""

    ready_at: float | None = None

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def poll(self) -> bool:
        return True

    def wait(self) -> list[int]:
        return self._ids


class ModelRunner:
    """Runs a decoder on blocks of `block_size` positions."""

    def __init__(self, decoder: Decoder, block_size: int, num_seats: int) -> None:
        self._decoder = decoder
        self._block_size = block_size
        self._device = decoder.embedding.device
        self._sampled = [0] * num_seats

    def launch(self, rows: list[Row]) -> Done:
        """Compute one step."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        last: list[int] = []
        size = self._block_size
        for row in rows:
            start, length = len(token_ids), len(row.token_ids)
            token_ids += row.token_ids
            if row.token_ids[-1] == PENDING_TOKEN:
                token_ids[-1] = self._sampled[row.seat]
            end = row.start + length
            positions += range(row.start, end)
            table = row.block_table
            context = [block * size + offset for block in table[: (end + size - 1) // size] for offset in range(size)]
            slots += context[row.start : end]
            context = context[:end] + [0] * (-end % TILE)
            spans.append(Span(start, length, row.start, torch.tensor(context, device=self._device)))
            if row.is_sampled:
                last.append(start + length - 1)
        logits = self._decoder.forward(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            torch.tensor(slots, device=self._device),
            spans,
            torch.tensor(last, dtype=torch.long, device=self._device),
        )
        return Done(self._sample([row for row in rows if row.is_sampled], logits))

    def _sample(self, rows: list[Row], logits: torch.Tensor) -> list[int]:
        ids = []
        for row, line in zip(rows, logits.cpu().numpy(), strict=True):
            position = row.start + len(row.token_ids)
            try:
                token = sample(line, row.sampling, uniform(row.seed, row.choice, position))
            except NonFiniteLogits:
                token = FAILED_TOKEN
            else:
                self._sampled[row.seat] = token
            ids.append(token)
        return ids

    def warm(self, num_tokens: int) -> bool:
        """Run the largest step, then ask whether a row's bits depend on its company; True when they do not.

        Changes the cache, which is empty again afterwards. The probe runs one token alone, at the head of 2, 3, 4, 17
        and `num_tokens` rows, and at the tail of 17, with the same context: its logits must be the same bits.
        """
        num_slots = self._decoder.k_cache.shape[1]
        largest = min(num_tokens, num_slots)
        reference = self._probe(1, 0)
        shapes = [(2, 0), (3, 0), (4, 0), (17, 0), (17, 16), (largest, 0), (largest, largest - 1)]
        exact = all(
            torch.equal(reference, self._probe(count, place)) for count, place in shapes if place < count <= largest
        )
        self._decoder.k_cache.zero_()
        self._decoder.v_cache.zero_()
        return exact

    def _probe(self, count: int, place: int) -> torch.Tensor:
        """Logits of token 1 at position 0 of slot `place`, as row `place` of `count` sequences of one token."""
        token_ids = torch.arange(2, count + 2, device=self._device) % self._decoder.config.vocab_size
        token_ids[place] = 1
        zeros = torch.zeros(count, dtype=torch.long, device=self._device)
        slots = torch.arange(count, device=self._device)
        spans = [
            Span(index, 1, 0, torch.tensor([index] + [0] * (TILE - 1), device=self._device)) for index in range(count)
        ]
        last = torch.tensor([place], device=self._device)
        return self._decoder.forward(token_ids, zeros, slots, spans, last)[0]
