"""Owns the fake model: a hash chain that yields tokens, its oracle, and a runner with a real KV store.

Knows no scheduler, no text and no socket. The worker's loop calls `SimRunner` as it calls any runner; clients
call `Oracle` or `expected_ids` to prove that nothing was lost, doubled or reordered. The chain is fixed
bytes, so that a client in any language can follow it:

    field(x) = u32 length of x, x                                 all numbers little-endian
    h(0)     = blake2b-64(field(version in UTF-8), field(u64 seed), field(u32 choice), field(u32 prompt ids))
    id(i)    = h(i) as u64 mod vocab_size                         the i-th output id, from 0
    h(i + 1) = blake2b-64(h(i), u32 id(i))
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import Annotated, Final, Protocol

from msgspec import Meta, Struct

from engine.clock import Clock, MonotonicClock
from engine.llm.runner import Scores

ID_BYTES: Final = 4
# `engine.llm.runner.PENDING_TOKEN`: siblings do not import each other; a test holds the two together.
PENDING_TOKEN: Final = -1
CACHE_TOKENS_MAX: Final = 1 << 24
# How far around a wrong token the oracle looks to tell lost from doubled.
ORACLE_REACH: Final = 64

_SEED_MASK: Final = (1 << 64) - 1


def first(version: str, prompt_ids: Seq[int], seed: int, choice: int) -> bytes:
    """h(0). A negative seed counts as its two's complement in 64 bits. Changes nothing."""
    return _first(version, pack(f"<{len(prompt_ids)}I", *prompt_ids), seed, choice)


def _first(version: str, prompt: bytes, seed: int, choice: int) -> bytes:
    name = version.encode()
    head = pack(f"<I{len(name)}sIQII", len(name), name, 8, seed & _SEED_MASK, 4, choice)
    return blake2b(b"".join((head, pack("<I", len(prompt)), prompt)), digest_size=8).digest()


def following(h: bytes, id: int) -> bytes:
    """h(i + 1) from h(i) and the id that was really appended. Changes nothing."""
    return blake2b(h + id.to_bytes(ID_BYTES, "little"), digest_size=8).digest()


def token(h: bytes, vocab_size: int) -> int:
    """id(i) from h(i). Changes nothing."""
    return int.from_bytes(h, "little") % vocab_size


def expected_ids(
    version: str, prompt_ids: Seq[int], seed: int, choice: int, vocab_size: int, count: int
) -> Iterator[int]:
    """The first `count` output ids. The chain has no end of its own: it goes on after an EOS id."""
    h = first(version, prompt_ids, seed, choice)
    for _ in range(count):
        id = token(h, vocab_size)
        yield id
        h = following(h, id)


class Oracle:
    """Checks the ids of one choice as they arrive. `num_checked` of them were right so far."""

    __slots__ = ("_h", "_recent", "_vocab_size", "num_checked")

    def __init__(self, version: str, prompt_ids: Seq[int], seed: int, choice: int, vocab_size: int) -> None:
        self._h = first(version, prompt_ids, seed, choice)
        self._vocab_size = vocab_size
        self._recent: list[int] = []
        self.num_checked = 0

    def check(self, ids: Seq[int]) -> None:
        """Take the next ids. Raises ValueError naming the position of the first wrong one and what it
        looks like (lost, doubled, reordered or wrong); the oracle then still waits for the right id there.
        """
        for index, id in enumerate(ids):
            expected = token(self._h, self._vocab_size)
            if id != expected:
                what = self._explain(list(ids[index : index + ORACLE_REACH]))
                raise ValueError(f"output token {self.num_checked}: expected {expected}, got {id} ({what})")
            self._h = following(self._h, id)
            self._recent.append(id)
            if len(self._recent) > 2 * ORACLE_REACH:
                del self._recent[:ORACLE_REACH]
            self.num_checked += 1

    def _explain(self, got: list[int]) -> str:
        """The smallest shift of the right stream that fits what came. A guess where few ids came."""
        ahead: list[int] = []
        h = self._h
        for _ in range(ORACLE_REACH + len(got)):
            ahead.append(token(h, self._vocab_size))
            h = following(h, ahead[-1])
        known = self._recent + ahead
        here = len(self._recent)
        for shift in range(1, ORACLE_REACH + 1):
            if known[here + shift : here + shift + len(got)] == got:
                return f"{shift} lost"
            if shift <= here and known[here - shift : here - shift + len(got)] == got:
                return f"{shift} doubled"
        if len(got) > 1 and sorted(got) == sorted(ahead[: len(got)]):
            return "reordered"
        return "wrong"


class SimOptions(Struct, frozen=True, kw_only=True):
    """What a fake model is and how long its steps take: step_s + token_s per token + seat_s per row, in
    seconds.

    Raises ValueError when the cache would exceed 2^24 tokens; the other bounds hold where it is decoded.
    """

    version: Annotated[str, Meta(min_length=1, max_length=64)] = "sim-1"
    vocab_size: Annotated[int, Meta(ge=1, le=257)] = 257
    step_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    token_s: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seat_s: Annotated[float, Meta(ge=0, le=1)] = 0.0
    is_async: bool = True
    num_blocks: Annotated[int, Meta(ge=1, le=1 << 16)] = 4096
    block_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 64

    def __post_init__(self) -> None:
        if self.num_blocks * self.block_size > CACHE_TOKENS_MAX:
            raise ValueError(f"num_blocks * block_size exceeds {CACHE_TOKENS_MAX} tokens")


class SimStatistics(Struct, frozen=True):
    """What a `SimRunner` did since it was built or warmed. `num_folded_whole` counts contexts hashed from
    their first token because the memo of the seat did not fit: about one per prefill and resume.
    """

    num_steps: int
    num_rows: int
    num_tokens: int
    num_folded_whole: int
    device_s: float


class SimRow(Protocol):
    """The shape of `engine.llm.runner.Row`, which says what the fields mean."""

    seat: int
    start: int
    token_ids: list[int]
    block_table: Seq[int]
    num_prompt_tokens: int
    seed: int
    choice: int
    is_sampled: bool


@dataclass(slots=True)
class _Seat:
    """What the device remembers of a seat: its last sampled id, and the memo of its last context."""

    sampled: int = PENDING_TOKEN
    key: tuple[int, int, int] | None = None
    context: bytes = b""
    h: bytes = b""


class SimHandle:
    """One launched step of a `SimRunner`: done at `ready_at`, on the runner's clock."""

    __slots__ = ("_clock", "_ids", "_ready_at", "_sleep", "ready_at", "scores")

    def __init__(self, ids: list[int], ready_at: float, clock: Clock, sleep: Callable[[float], None]) -> None:
        self._ids: list[int] | None = ids
        # None would mean that the device cannot say; this one always can.
        self.ready_at: float | None = ready_at
        self.scores: Scores | None = None  # the fake model has no logits
        self._ready_at = ready_at
        self._clock = clock
        self._sleep = sleep

    def poll(self) -> bool:
        """True when `wait` would return at once. Changes nothing."""
        return self._clock.now() >= self._ready_at

    def wait(self) -> list[int]:
        """Sleep until `ready_at`; the sampled ids in row order. Raises RuntimeError when called again."""
        ids, self._ids = self._ids, None
        if ids is None:
            raise RuntimeError("this step has been waited for already")
        left_s = self._ready_at - self._clock.now()
        if left_s > 0:
            self._sleep(left_s)
        return ids


class SimRunner:
    """A device whose next id depends on every id it reads back through the block table, and on nothing else.

    A wrong block, slot, length or eviction thus changes the text at once. Results are computed inside
    `launch`, in launch order; only their arrival is delayed. In asynchronous mode steps queue on the device,
    one after the other; otherwise the time passes inside `launch`. Not for use from two threads.
    """

    __slots__ = (
        "_block",
        "_block_size",
        "_cache",
        "_clock",
        "_device_s",
        "_free_at",
        "_num_folded_whole",
        "_num_rows",
        "_num_steps",
        "_num_tokens",
        "_seats",
        "_sleep",
        "options",
    )

    def __init__(
        self,
        options: SimOptions,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options = options
        self._block_size = options.block_size
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._sleep = sleep
        block_bytes = options.block_size * ID_BYTES
        self._cache = bytearray(options.num_blocks * block_bytes)
        view = memoryview(self._cache)
        # block id -> its bytes. A dict, so that an id the pool does not have raises instead of wrapping
        # round.
        self._block = {i: view[i * block_bytes : (i + 1) * block_bytes] for i in range(options.num_blocks)}
        self._clear()

    def _clear(self) -> None:
        # 0xFFFFFFFF is no id: a position read before it was written changes the text, even for a prompt of
        # zeros.
        self._cache[:] = b"\xff" * len(self._cache)
        self._seats = {seat: _Seat() for seat in range(self.options.max_num_seqs)}
        self._free_at = self._clock.now()
        self._num_steps = 0
        self._num_rows = 0
        self._num_tokens = 0
        self._num_folded_whole = 0
        self._device_s = 0.0

    def launch(self, rows: Seq[SimRow]) -> SimHandle:
        """Start one step. Changes the cache at the rows' positions and the seats of the sampled rows.
        Raises KeyError or IndexError for a block or seat that does not exist, and OverflowError for a
        pending token nobody sampled.
        """
        started_at = self._clock.now()
        num_tokens = 0
        # All rows write before any reads, as in a layer of a real model: two rows in one block disturb each
        # other.
        for row in rows:
            num_tokens += len(row.token_ids)
            self._write(row)
        ids = [self._sample(row) for row in rows if row.is_sampled]
        options = self.options
        duration_s = options.step_s + options.token_s * num_tokens + options.seat_s * len(rows)
        self._num_steps += 1
        self._num_rows += len(rows)
        self._num_tokens += num_tokens
        self._device_s += duration_s
        ready_at = max(started_at, self._free_at) + duration_s
        self._free_at = ready_at
        handle = SimHandle(ids, ready_at, self._clock, self._sleep)
        if not options.is_async:
            left_s = ready_at - self._clock.now()
            if left_s > 0:
                self._sleep(left_s)
        return handle

    def warm(self, num_tokens: int) -> None:
        """Run the largest steps: one row of `num_tokens` tokens (fewer where the cache is smaller), then a
        row in every seat. Takes the time such steps take, then clears the cache, the seats and the
        statistics. Raises RuntimeError once a step has run.
        """
        if self._num_steps:
            raise RuntimeError("warm runs before the first step: it clears the cache")
        options = self.options
        length = max(1, min(num_tokens, options.num_blocks * self._block_size))
        table = list(range(-(-length // self._block_size)))
        self.launch([_WarmRow(0, [0] * length, table, length)]).wait()
        self.launch([_WarmRow(seat, [0], [0], 1) for seat in range(options.max_num_seqs)]).wait()
        self._clear()

    def statistics(self) -> SimStatistics:
        """Counters so far. Changes nothing."""
        return SimStatistics(
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            num_folded_whole=self._num_folded_whole,
            device_s=self._device_s,
        )

    def _write(self, row: SimRow) -> None:
        ids, table = row.token_ids, row.block_table
        last = ids[-1]
        if last == PENDING_TOKEN:
            last = self._seats[row.seat].sampled
        data = last.to_bytes(ID_BYTES, "little")
        index, offset = divmod(row.start, self._block_size)
        begin = offset * ID_BYTES
        if len(ids) == 1:
            self._block[table[index]][begin : begin + ID_BYTES] = data
            return
        data = pack(f"<{len(ids) - 1}I", *ids[:-1]) + data
        done = 0
        while done < len(data):
            block = self._block[table[index]]
            size = min(len(block) - begin, len(data) - done)
            block[begin : begin + size] = data[done : done + size]
            done += size
            index += 1
            begin = 0

    def _sample(self, row: SimRow) -> int:
        end = row.start + len(row.token_ids)
        table: Seq[int] = row.block_table
        num_blocks = -(-end // self._block_size)
        if len(table) != num_blocks:
            table = table[:num_blocks]
        context = b"".join(map(self._block.__getitem__, table))[: end * ID_BYTES]
        if len(context) != end * ID_BYTES:
            raise IndexError(f"seat {row.seat}: its block table ends before position {end}")
        seat = self._seats[row.seat]
        key = (row.num_prompt_tokens, row.seed, row.choice)
        # The memo only saves work: it counts where the very bytes just read begin with the bytes it was made
        # from.
        if seat.key == key and context.startswith(seat.context):
            h, at = seat.h, len(seat.context)
        else:
            at = row.num_prompt_tokens * ID_BYTES
            h = _first(self.options.version, context[:at], row.seed, row.choice)
            self._num_folded_whole += 1
        for begin in range(at, len(context), ID_BYTES):
            h = blake2b(h + context[begin : begin + ID_BYTES], digest_size=8).digest()
        # A context cut inside its prompt (a fault of the scheduler) has no h to go on from.
        seat.key = key if at <= len(context) else None
        seat.context, seat.h = context, h
        seat.sampled = id = token(h, self.options.vocab_size)
        return id


@dataclass(slots=True)
class _WarmRow:
    seat: int
    token_ids: list[int]
    block_table: Seq[int]
    num_prompt_tokens: int
    start: int = 0
    seed: int = 0
    choice: int = 0
    is_sampled: bool = True
