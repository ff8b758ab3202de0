"""Owns one worker process: its spawn by module name, its descriptors, its signals, its reaping.

Knows no state machine and no route. Called by the supervisor actor from the front's main thread. A signal goes to the
very process that was started, through its pidfd, never to a number that may have been reused or to a group.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Final

from ipc.parent import DEATH_FD, PARENT_PID

PAGE_FD: Final = "ENGINE_CHILD_PAGE_FD"


class WorkerProcess:
    """A running or ended child. `pidfd` is readable once it has ended."""

    __slots__ = ("_death_fd", "_popen", "pid", "pidfd")

    def __init__(self, popen: "subprocess.Popen[bytes]", death_fd: int) -> None:
        self._popen = popen
        self._death_fd = death_fd
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)

    def exit_status(self) -> int | None:
        """None while it runs; then its exit code, or minus the signal that ended it. Reaps it."""
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal it. Nothing happens when it has ended."""
        if self._popen.poll() is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Give the descriptors back, once it has been reaped."""
        os.close(self.pidfd)
        os.close(self._death_fd)


def spawn(module: str, environment: Mapping[str, str], fd: int, fd_name: str = PAGE_FD) -> WorkerProcess:
    """Start `python -m module` as a child that dies with this process, and inherits `fd`, told by `fd_name`.

    Raises RuntimeError off the main thread.

    The child is exec'ed, never forked: it shares no device context and no lock with its parent. A terminal's Ctrl-C
    does not reach it, since it has a session of its own. PR_SET_PDEATHSIG follows the thread that forked: hence the
    main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("workers are started from the main thread only")
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        popen = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            env={
                **environment,
                PARENT_PID: str(os.getpid()),
                DEATH_FD: str(read_end),
                fd_name: str(fd),
            },
            pass_fds=(read_end, fd),
            start_new_session=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return WorkerProcess(popen, write_end)
