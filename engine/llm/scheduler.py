"""Owns which sequences get how many of a step's tokens: continuous batching with one token budget.

There is no prefill mode and no decode mode: every sequence owes the tokens between `num_computed` and what it knows.
Knows blocks and sequences; no device, no socket, no text. Called by the worker's loop: `schedule` may be called again
before the step before it is committed. `commit` is the only writer of ids.

Order and starvation. Sequences run in order of arrival. When blocks run out the youngest running one gives its blocks
back and waits, keeping its place by arrival; nobody is admitted in that step, and one is admitted only when all it
knows fits in the free blocks. So the oldest always gets through, and two equals never take turns.
"""

from bisect import insort
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from engine.llm.blocks import AuditError, BlockPool
from engine.llm.runner import FAILED_TOKEN
from engine.llm.sequence import FinishReason, Sequence, SequenceState
from ipc.errors import Code, EngineError

MAX_IN_FLIGHT: Final = 2


class Limits(Struct, frozen=True):
    """`max_batched_tokens` is the budget of one step; `max_waiting` bounds what is taken in beyond the seats."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_waiting: int = 4096


@dataclass(slots=True, eq=False)
class Chunk:
    """Positions start .. start + length of a sequence; sampled when they reach the end of what it knows."""

    sequence: Sequence
    start: int
    length: int
    is_sampled: bool
    generation: int  # preemptions of the sequence before this: later ones make the chunk's blocks stale


@dataclass(slots=True, eq=False)
class Step:
    chunks: list[Chunk]
    num_tokens: int


@dataclass(slots=True, eq=False)
class Emission:
    """New ids of a sequence, and the reason if they are its last."""

    sequence: Sequence
    ids: list[int]
    reason: FinishReason | None


class SchedulerStatistics(Struct, frozen=True):
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int


class Scheduler:
    """Continuous batching over one block pool."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self._sequences: dict[tuple[int, int], Sequence] = {}  # by request and choice
        self._running: list[Sequence] = []  # by arrival
        self._waiting: list[Sequence] = []  # by arrival
        self._leaving: set[Sequence] = set()  # finished, with a step in flight that still uses their blocks
        self._seats = list(range(limits.max_num_seqs - 1, -1, -1))
        # Full prompt blocks that a running sequence will publish: whoever else needs one waits for it.
        self._computing: dict[bytes, Sequence] = {}
        self._arrivals = 0
        self._num_in_flight = 0
        self.num_preemptions = 0
        self.num_recomputed = 0  # tokens computed again after a preemption

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in. Raises EngineError naming the field when it can never run, or when too many wait."""
        limits, capacity = self.limits, self.pool.num_blocks * self.pool.block_size
        length = len(sequence.token_ids)
        if length == 0:
            raise EngineError(Code.INVALID, "the prompt is empty", "prompt")
        if length >= limits.max_model_len:
            # litellm and langchain tell this from other faults by the words "prompt is too long" alone.
            room = f"the context of {limits.max_model_len} holds the answer too"
            message = f"the prompt is too long: it has {length} tokens; {room}"
            raise EngineError(Code.TOO_LARGE, message, "prompt")
        end = min(sequence.num_prompt_tokens + sequence.max_tokens, limits.max_model_len)
        if end > capacity:
            message = f"prompt and max_tokens make {end} tokens; all blocks together hold {capacity}"
            raise EngineError(Code.TOO_LARGE, message, "max_tokens")
        key = sequence.request, sequence.choice
        if key in self._sequences:
            raise EngineError(Code.DUPLICATE, f"request {sequence.request} is here already", "request")
        if len(self._waiting) >= limits.max_waiting:
            raise EngineError(Code.OVERLOADED, f"{limits.max_waiting} sequences wait in this worker")
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._sequences[key] = sequence
        self._waiting.append(sequence)

    def cancel(self, request: int, choice: int = 0) -> bool:
        """End a sequence; False when it is not here (any more). Its blocks come back when no step uses them."""
        return self.finish(request, FinishReason.CANCELLED, choice)

    def finish(self, request: int, reason: FinishReason, choice: int = 0) -> bool:
        """End a sequence for a reason found outside, as a stop string. False when it is not here."""
        sequence = self._sequences.get((request, choice))
        if sequence is None:
            return False
        self._leave(sequence, reason)
        return True

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run before a commit. Changes reservations only.

        Whole on purpose: budget, blocks and victims of running sequences are one decision.
        """
        if self._num_in_flight >= MAX_IN_FLIGHT:
            return None
        pool, limits, running = self.pool, self.limits, self._running
        block_size = pool.block_size
        budget = limits.max_batched_tokens
        chunks: list[Chunk] = []
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            index += 1
            num_known = len(sequence.token_ids) + sequence.num_pending
            start = sequence.num_computed
            length = num_known - start
            length = min(length, budget)
            max_tokens = sequence.max_tokens
            if (
                length <= 0
                or (max_tokens and num_known - sequence.num_prompt_tokens >= max_tokens)
                or num_known >= limits.max_model_len
            ):
                continue  # the token that ends it is pending
            table = sequence.block_table
            end = start + length
            num_needed = (end + block_size - 1) // block_size - len(table)
            if num_needed > 0:
                if num_needed > pool.num_free and not self._make_room(sequence, num_needed):
                    break  # it was the youngest itself
                for _ in range(num_needed):
                    table.append(pool.allocate())
            budget -= length
            chunks.append(self._reserve(sequence, start, length, end == num_known and max_tokens > 0))
        if num_preemptions == self.num_preemptions and self._waiting:
            budget = self._admit(chunks, budget)
        if not chunks:
            return None
        self._num_in_flight += 1
        return Step(chunks, limits.max_batched_tokens - budget)

    def _reserve(self, sequence: Sequence, start: int, length: int, is_sampled: bool) -> Chunk:
        sequence.num_computed = end = start + length
        if start < sequence.num_ever_computed:
            self.num_recomputed += min(end, sequence.num_ever_computed) - start
        sequence.num_ever_computed = max(end, sequence.num_ever_computed)
        sequence.num_in_flight += 1
        if is_sampled:
            sequence.num_pending += 1
        return Chunk(sequence, start, length, is_sampled, sequence.num_preempted)

    def _make_room(self, sequence: Sequence, num_needed: int) -> bool:
        """Preempt the youngest until there is room. False when `sequence` itself had to go."""
        while self.pool.num_free < num_needed:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._running.pop()
        victim.move(SequenceState.WAITING)  # RUNNING -> WAITING
        self._give_back(victim)
        victim.num_preempted += 1
        victim.num_computed = 0
        self.num_preemptions += 1
        insort(self._waiting, victim, key=lambda sequence: sequence.arrival)

    def _give_back(self, sequence: Sequence) -> None:
        """Its blocks and its seat are free; what it was computing, it is not any more."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []  # a new list: rows in flight still read the old one
        sequence.num_published = 0
        self._take_seat_back(sequence)

    def _take_seat_back(self, sequence: Sequence) -> None:
        if sequence.seat >= 0:
            self._seats.append(sequence.seat)
            sequence.seat = -1
        if self._computing:
            for key in sequence.keys:
                if self._computing.get(key) is sequence:
                    del self._computing[key]

    def _admit(self, chunks: list[Chunk], budget: int) -> int:
        """Give waiting sequences, oldest first, a seat and their first chunk; returns what is left of the budget."""
        pool, waiting = self.pool, self._waiting
        block_size = pool.block_size
        index = 0
        while index < len(waiting) and budget > 0 and self._seats:
            sequence = waiting[index]
            hits = None if sequence.num_pending else self._match(sequence)
            if hits is None:  # its result, or a block it shares, is still being computed
                index += 1
                continue
            num_free = pool.num_free - sum(pool.is_evictable(block) for block in hits)
            if (len(sequence.token_ids) + block_size - 1) // block_size - len(hits) > num_free:
                break
            del waiting[index]
            budget -= self._start(sequence, hits, budget, chunks)
        return budget

    def _start(self, sequence: Sequence, hits: list[int], budget: int, chunks: list[Chunk]) -> int:
        """WAITING -> RUNNING with its first chunk; returns the tokens of that chunk."""
        pool = self.pool
        sequence.move(SequenceState.RUNNING)
        for block in hits:
            pool.share(block)
        table = sequence.block_table = list(hits)
        num_hit = len(hits) * pool.block_size
        sequence.num_published = len(hits)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached_tokens = num_hit
            pool.num_hit_tokens += num_hit
            pool.num_queried_tokens += sequence.num_prompt_tokens
        sequence.seat = self._seats.pop()
        num_known = len(sequence.token_ids)
        length = min(num_known - num_hit, budget)
        end = num_hit + length
        num_needed = (end + pool.block_size - 1) // pool.block_size - len(table)
        table.extend(pool.allocate() for _ in range(num_needed))
        if pool.is_cached:
            for key in sequence.keys[len(hits) :]:
                self._computing.setdefault(key, sequence)
        insort(self._running, sequence, key=lambda other: other.arrival)
        chunks.append(self._reserve(sequence, num_hit, length, end == num_known and sequence.max_tokens > 0))
        return length

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Cached blocks that begin with this sequence's tokens; None when the next one is being computed right now.

        At least the last known token is always computed: somebody has to give its logits. So is every token of a
        prompt that is scored.
        """
        pool = self.pool
        if not pool.is_cached or sequence.is_scored:
            return []
        num_full = (len(sequence.token_ids) - 1) // pool.block_size
        self._extend_keys(sequence, num_full)
        hits: list[int] = []
        parent = b""
        for index in range(num_full):
            key = sequence.keys[index]
            start = index * pool.block_size
            tokens = sequence.token_ids[start : start + pool.block_size]
            block = pool.lookup(key, sequence.namespace, parent, tokens)
            if block is None:
                owner = self._computing.get(key)
                return None if owner is not None and owner is not sequence else hits
            hits.append(block)
            parent = key
        return hits

    def _extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
        pool, keys = self.pool, sequence.keys
        size = pool.block_size
        while len(keys) < num_blocks:
            start = len(keys) * size
            parent = keys[-1] if keys else b""
            keys.append(pool.key(sequence.namespace, parent, sequence.token_ids[start : start + size]))

    def commit(self, step: Step, sampled: list[int]) -> list[Emission]:
        """Write what a step gave: one id per sampled chunk, in order. Steps are committed in the order they were made.

        Ids for sequences that have ended meanwhile are dropped, and their blocks come back.
        """
        self._num_in_flight -= 1
        emissions: list[Emission] = []
        position = 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_in_flight -= 1
            token = -1
            if chunk.is_sampled:
                token = sampled[position]
                position += 1
                sequence.num_pending -= 1
            if sequence.state is SequenceState.FINISHED:
                if sequence.num_in_flight == 0 and sequence in self._leaving:
                    self._leaving.discard(sequence)
                    self.pool.release(sequence.block_table)
                    sequence.block_table = []
                continue
            if chunk.generation == sequence.num_preempted:
                self._publish(sequence, chunk.start + chunk.length)
            if token == FAILED_TOKEN:
                emissions.append(Emission(sequence, [], FinishReason.FAILED))
                self._leave(sequence, FinishReason.FAILED)
            elif sequence.max_tokens == 0 and chunk.start + chunk.length == len(sequence.token_ids):
                emissions.append(Emission(sequence, [], FinishReason.LENGTH))
                self._leave(sequence, FinishReason.LENGTH)
            elif chunk.is_sampled:
                sequence.token_ids.append(token)
                reason = self._reason(sequence, token)
                emissions.append(Emission(sequence, [token], reason))
                if reason is not None:
                    self._leave(sequence, reason)
        return emissions

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Full blocks below position `end` enter the prefix cache."""
        pool = self.pool
        num_full = end // pool.block_size
        if num_full <= sequence.num_published or not pool.is_cached:
            return
        self._extend_keys(sequence, num_full)
        keys, size = sequence.keys, pool.block_size
        for index in range(sequence.num_published, num_full):
            key = keys[index]
            parent = keys[index - 1] if index else b""
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            pool.publish(sequence.block_table[index], key, sequence.namespace, parent, tokens)
            if self._computing.get(key) is sequence:
                del self._computing[key]
        sequence.num_published = num_full

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        if num_output >= sequence.min_tokens and (
            token in sequence.stop_ids or (token in sequence.eos_ids and not sequence.ignore_eos)
        ):
            return FinishReason.STOP
        if num_output >= sequence.max_tokens or len(sequence.token_ids) >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        """WAITING or RUNNING -> FINISHED."""
        (self._running if sequence.state is SequenceState.RUNNING else self._waiting).remove(sequence)
        sequence.move(SequenceState.FINISHED)
        sequence.reason = reason
        del self._sequences[sequence.request, sequence.choice]
        if sequence.num_in_flight and sequence.block_table:
            self._leaving.add(sequence)
            self._take_seat_back(sequence)
        else:
            self._give_back(sequence)

    def audit(self) -> None:
        """Raise AuditError unless pool, tables, seats and lists agree. Changes nothing."""
        holders = [*self._running, *self._leaving]
        self.pool.audit([sequence.block_table for sequence in holders])
        if any(sequence.block_table for sequence in self._waiting):
            raise AuditError("a waiting sequence holds blocks")
        seats = sorted([*self._seats, *(sequence.seat for sequence in self._running)])
        if seats != list(range(self.limits.max_num_seqs)):
            raise AuditError(f"seats do not add up: {seats}")
        if len(self._sequences) != len(self._running) + len(self._waiting):
            raise AuditError("a sequence is in no list")
        if not self._sequences and self._computing:
            raise AuditError("blocks are said to be computed by nobody")

    def statistics(self) -> SchedulerStatistics:
        pool = self.pool.statistics()
        return SchedulerStatistics(
            len(self._running),
            len(self._waiting),
            self.num_preemptions,
            pool.num_free,
            pool.num_cached,
            pool.num_evicted,
            pool.num_queried_tokens,
            pool.num_hit_tokens,
        )
