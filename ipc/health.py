"""Owns the health page: the memory a worker writes and the supervisor reads, without a lock and without a message.

Knows no process and no socket. One sealed memfd per worker, made by the supervisor and inherited. Little-endian:

    0  u32 magic        16 u32 phase            32 u64 heartbeat, ns    48 u32 running     64 u16 length of the reason
    4  u32 sequence     20 u32 manifest count   40 u64 step             52 u32 waiting     66 the reason, UTF-8
    8  u64 epoch        24 u64 deadline, ns                             56 u32 free blocks
                                                                        60 u32 blocks
    256 … u64 request numbers of the step that runs now

All instants are CLOCK_MONOTONIC. `sequence` is odd while the worker writes (a seqlock): a reader tries a few times and
otherwise keeps what it read last. Nothing a worker could scribble here raises in the reader.
"""

import fcntl
import mmap
import os
import struct
import time
from enum import IntEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

MAGIC: Final = 0x31454750  # "PGE1"
MANIFEST_AT: Final = 256
REASON_AT: Final = 64
REASON_MAX: Final = MANIFEST_AT - REASON_AT - 2
READ_TRIES: Final = 5
NS: Final = 1_000_000_000

_HEAD: Final = struct.Struct("<IIQIIQQQIIII")
_SEQUENCE: Final = struct.Struct("<I")
_PHASE: Final = struct.Struct("<I")
_DEADLINE_AT: Final = struct.Struct("<QQ")  # deadline and heartbeat
_LENGTH: Final = struct.Struct("<H")
SEQUENCE_AT: Final = 4
PHASE_AT: Final = 16
COUNT_AT: Final = 20
TIMES_AT: Final = 24
STEP_AT: Final = 40
GAUGES_AT: Final = 48


class Phase(IntEnum):
    """What the worker's main loop is doing, or about to block in."""

    IMPORTING = 0
    LOADING = 1
    WARMING = 2
    IDLE = 3
    STEPPING = 4
    EXITING = 5


class Page(Struct, frozen=True):
    """One consistent reading. `is_corrupt`: the worker wrote what no worker writes."""

    epoch: int = 0
    phase: Phase = Phase.IMPORTING
    deadline_at: float = 0.0
    heartbeat_at: float = 0.0
    step: int = 0
    manifest: tuple[int, ...] = ()
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    is_corrupt: bool = False


def page_bytes(num_seats: int) -> int:
    """Size of a page whose step may hold `num_seats` requests."""
    return MANIFEST_AT + 8 * num_seats


def create(num_seats: int, epoch: int, boot_s: float) -> int:
    """A new page as a file descriptor. The first phase's deadline is `boot_s` from now. Raises OSError."""
    fd = os.memfd_create("engine-health", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = page_bytes(num_seats)
    os.ftruncate(fd, size)
    now = time.monotonic_ns()
    deadline = now + int(boot_s * NS)
    os.pwrite(fd, _HEAD.pack(MAGIC, 0, epoch, Phase.IMPORTING, 0, deadline, now, 0, 0, 0, 0, 0), 0)
    # Sealed: a worker that shrank it would make the reader die of SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class PageWriter:
    """The worker's side. Each method is a microsecond or a few; call them before blocking, not after."""

    __slots__ = ("_map", "_seats", "_sequence")

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self._seats = (size - MANIFEST_AT) // 8
        self._sequence = 0

    def _begin(self) -> None:
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, SEQUENCE_AT, self._sequence & 0xFFFFFFFF)

    _end = _begin

    def enter(self, phase: Phase, patience_s: float) -> None:
        """The loop is about to do this, and is hung if it has not said something else `patience_s` from now."""
        now = time.monotonic_ns()
        self._begin()
        _PHASE.pack_into(self._map, PHASE_AT, phase)
        _DEADLINE_AT.pack_into(self._map, TIMES_AT, now + int(patience_s * NS), now)
        self._end()

    def step(self, number: int, requests: list[int]) -> None:
        """Step `number` runs these requests: they are suspects should it kill this process."""
        held = requests[: self._seats]
        self._begin()
        struct.pack_into("<I", self._map, COUNT_AT, len(held))
        struct.pack_into("<Q", self._map, STEP_AT, number)
        struct.pack_into(f"<{len(held)}Q", self._map, MANIFEST_AT, *held)
        self._end()

    def gauges(self, num_running: int, num_waiting: int, num_free_blocks: int, num_blocks: int) -> None:
        """Numbers for people who look while the sockets are stuck."""
        self._begin()
        struct.pack_into("<IIII", self._map, GAUGES_AT, num_running, num_waiting, num_free_blocks, num_blocks)
        self._end()

    def crash(self, reason: str) -> None:
        """Why this process is about to end by itself. Cut to REASON_MAX bytes."""
        data = reason.encode("utf-8", "replace")[:REASON_MAX]
        self._begin()
        _LENGTH.pack_into(self._map, REASON_AT, len(data))
        self._map[REASON_AT + 2 : REASON_AT + 2 + len(data)] = data
        self._end()


class PageReader:
    """The supervisor's side; it never raises on what a worker wrote."""

    __slots__ = ("_last", "_map", "_seats")

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._seats = (size - MANIFEST_AT) // 8
        self._last = Page()

    def read(self) -> Page:
        """The page now, or the last consistent reading when the worker keeps writing."""
        for _ in range(READ_TRIES):
            before = _SEQUENCE.unpack_from(self._map, SEQUENCE_AT)[0]
            data = self._map[:]
            if before % 2 == 0 and _SEQUENCE.unpack_from(self._map, SEQUENCE_AT)[0] == before:
                self._last = self._parse(data)
                break
        return self._last

    def _parse(self, data: bytes) -> Page:
        magic, _, epoch, phase, count, deadline, heartbeat, step, *gauges = _HEAD.unpack_from(data)
        length = _LENGTH.unpack_from(data, REASON_AT)[0]
        if magic != MAGIC or phase not in set(Phase) or count > self._seats or length > REASON_MAX:
            return replace(self._last, is_corrupt=True)
        manifest = struct.unpack_from(f"<{count}Q", data, MANIFEST_AT)
        reason = data[REASON_AT + 2 : REASON_AT + 2 + length].decode("utf-8", "replace")
        return Page(epoch, Phase(phase), deadline / NS, heartbeat / NS, step, manifest, reason, *gauges)

    def close(self) -> None:
        self._map.close()
