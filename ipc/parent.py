"""Owns what every child process does before anything else: tie its life to its parent's.

Knows nothing but two environment variables. Called first thing by workers, and by whatever they start in turn. Three
ways, because each has a hole: PR_SET_PDEATHSIG acts inside a kernel launch but is lost in the moment before it is set;
getppid closes that moment; the pipe is seen by grandchildren and by whatever shares no parent thread.
"""

import ctypes
import os
import signal
import threading
from typing import Final

PARENT_PID: Final = "ENGINE_CHILD_PARENT_PID"
DEATH_FD: Final = "ENGINE_CHILD_DEATH_FD"
EXIT_ORPHAN: Final = 75
_PR_SET_PDEATHSIG: Final = 1


def guard() -> None:
    """Die with the parent from now on. Exits with 75 when it is gone already; does nothing without a parent named."""
    if PARENT_PID not in os.environ:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[PARENT_PID]):
        os._exit(EXIT_ORPHAN)
    if DEATH_FD in os.environ:
        fd = int(os.environ[DEATH_FD])
        threading.Thread(target=_watch, args=(fd,), name="parent-watch", daemon=True).start()


def _watch(fd: int) -> None:
    """The parent holds the other end and never writes: end of file is its death."""
    while os.read(fd, 1):
        pass
    os._exit(EXIT_ORPHAN)
