"""Real children: they die with their parent, whatever they are doing, and nobody else does."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from engine.supervisor.process import WorkerProcess, spawn
from ipc.health import create
from ipc.parent import DEATH_FD, EXIT_ORPHAN, PARENT_PID
from tests.system.harness import ROOT, is_gone, until

CHILD = """
import os, sys
from ipc.parent import guard
guard()
open(os.environ["CHILD_FILE"], "a").write(f"{os.getpid()}\\n")
BUSY
"""
BUSY = {
    "idle": "import signal; signal.pause()",
    "in a C call that holds the lock": "import ctypes; ctypes.PyDLL(None).sleep(60)",
    "deaf to signals": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()",
}
PARENT = """
import os, sys, signal
sys.path.insert(0, os.environ["CHILD_PATH"])
from engine.supervisor.process import spawn
from ipc.health import create
path = os.environ["CHILD_PATH"] + ":" + os.environ["ROOT"]
for _ in range(2):
    spawn("child_module", {**os.environ, "PYTHONPATH": path}, create(4, 1, 9.0))
print("up", flush=True)
signal.pause()
"""


def start_parent(directory: Path, busy: str) -> tuple["subprocess.Popen[str]", Path]:
    directory.mkdir()
    (directory / "child_module.py").write_text(CHILD.replace("BUSY", BUSY[busy]))
    told = directory / "pids"
    environment = {**os.environ, "CHILD_PATH": str(directory), "CHILD_FILE": str(told), "ROOT": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    return parent, told


def pids(told: Path) -> list[int]:
    return [int(line) for line in told.read_text().split()] if told.exists() else []


@pytest.mark.parametrize("busy", list(BUSY))
def test_children_die_with_a_killed_parent_and_another_parents_live(tmp_path: Path, busy: str):
    """vllm-project/vllm#34816: a watch thread cannot fire while the main thread holds the lock.

    The parents are scripts without a main guard, which forked or re-imported children would run again
    (vllm-project/vllm#7151, #8893): ours are executed afresh.
    """
    first, first_told = start_parent(tmp_path / "a", busy)
    second, second_told = start_parent(tmp_path / "b", busy)
    try:
        until(lambda: len(pids(first_told)) == len(pids(second_told)) == 2, what="four children")
        first.kill()
        first.wait()
        until(lambda: all(is_gone(pid) for pid in pids(first_told)), 5.0, "gone within 5 s")
        assert not any(is_gone(pid) for pid in pids(second_told))
    finally:
        for each in (first, second):
            each.kill()
            each.wait()
            each.stdout.close()
    until(lambda: all(is_gone(pid) for pid in pids(second_told)), 5.0, "gone within 5 s")


def test_a_child_whose_parent_is_already_gone_ends_at_once():
    environment = {**os.environ, PARENT_PID: "1"}
    ended = subprocess.run(
        [sys.executable, "-c", "from ipc.parent import guard; guard(); print('alive')"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (EXIT_ORPHAN, b"")


def test_the_end_of_the_death_pipe_ends_a_child():
    """For grandchildren, whose own parent may live on."""
    read_end, write_end = os.pipe()
    environment = {**os.environ, PARENT_PID: str(os.getpid()), DEATH_FD: str(read_end)}
    child = subprocess.Popen(
        [sys.executable, "-c", "from ipc.parent import guard; guard(); import signal; signal.pause()"],
        cwd=ROOT,
        env=environment,
        pass_fds=(read_end,),
    )
    os.close(read_end)
    os.close(write_end)
    assert child.wait(10) == EXIT_ORPHAN


def run_module(name: str) -> WorkerProcess:
    fd = create(4, 1, 9.0)
    try:
        return spawn(name, os.environ, fd)
    finally:
        os.close(fd)


def test_a_pidfd_tells_of_the_end_and_the_child_is_reaped():
    process = run_module("this")  # prints a poem and ends
    poller = select.poll()
    poller.register(process.pidfd, select.POLLIN)
    assert poller.poll(10_000)
    until(lambda: process.exit_status() is not None, what="reaped")
    assert process.exit_status() == 0
    process.send(signal.SIGKILL)  # nothing happens: it is gone, and its number may be another's
    process.close()


def test_workers_start_from_the_main_thread_only():
    """PR_SET_PDEATHSIG follows the thread that forked: a pool thread that ends would take its children along."""
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            run_module("this")
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
