"""The health page: consistent under writes, sealed, and nothing a worker scribbles raises."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipc.health import MAGIC, REASON_MAX, Page, PageReader, PageWriter, Phase, create, page_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fd():
    made = create(8, 7, 5.0)
    yield made
    os.close(made)


def test_a_new_page_says_importing_with_the_boot_deadline(fd: int):
    page = PageReader(fd).read()
    assert (page.epoch, page.phase, page.manifest, page.reason) == (7, Phase.IMPORTING, (), "")
    assert 4.0 < page.deadline_at - time.monotonic() <= 5.0


def test_what_is_written_is_read(fd: int):
    writer, reader = PageWriter(fd), PageReader(fd)
    writer.enter(Phase.STEPPING, 2.0)
    writer.step(41, [3, 2**63, 5])
    writer.gauges(1, 2, 3, 4)
    writer.crash("außer Speicher")
    page = reader.read()
    assert (page.phase, page.step, page.manifest) == (Phase.STEPPING, 41, (3, 2**63, 5))
    assert (page.num_running, page.num_waiting, page.num_free_blocks, page.num_blocks) == (1, 2, 3, 4)
    assert page.reason == "außer Speicher"
    assert not page.is_corrupt
    assert 1.0 < page.deadline_at - page.heartbeat_at <= 2.0


def test_a_manifest_longer_than_the_seats_and_a_reason_too_long_are_cut(fd: int):
    writer, reader = PageWriter(fd), PageReader(fd)
    writer.step(1, list(range(20)))
    writer.crash("ä" * 500)
    page = reader.read()
    assert page.manifest == tuple(range(8))
    assert page.reason.startswith("ä" * (REASON_MAX // 2))


def test_the_page_can_neither_shrink_nor_grow(fd: int):
    """A worker that shrank it would make the supervisor die of SIGBUS."""
    for size in (0, 10, page_bytes(8) * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_a_reader_never_raises_and_never_believes_garbage(fd: int):
    reader = PageReader(fd)
    good = reader.read()
    dice = random.Random(3)
    for _ in range(300):
        os.pwrite(fd, dice.randbytes(page_bytes(8)), 0)
        page = reader.read()
        assert page.is_corrupt or page == good or page.phase in set(Phase)
    os.pwrite(fd, MAGIC.to_bytes(4, "little") + bytes(page_bytes(8) - 4), 0)
    assert reader.read() == Page()


WRITER = """
import sys
from ipc.health import PageWriter
writer = PageWriter(int(sys.argv[1]))
number = 0
while True:
    number += 1
    writer.step(number, [number] * 8)
"""


def test_readings_are_consistent_while_a_worker_writes(fd: int):
    reader = PageReader(fd)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], cwd=ROOT, pass_fds=(fd,))
    try:
        steps = set()
        give_up_at = time.monotonic() + 20
        while len(steps) < 1000 and time.monotonic() < give_up_at:
            page = reader.read()
            assert page.manifest in {(page.step,) * 8, ()}
            steps.add(page.step)
        assert len(steps) == 1000
    finally:
        writer.kill()
        writer.wait()


def test_nothing_is_left_in_shared_memory(fd: int):
    assert not [name for name in os.listdir("/dev/shm") if "engine" in name]
