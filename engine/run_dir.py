"""Owns the run directory: made 0700, owned by this user, locked by one engine. Knows no socket's meaning.

Called by `engine/serve.py` before anything is bound. The lock dies with the process, however it dies.
"""

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from ipc.channel import clear_stale_socket
from ipc.errors import Code, EngineError

SOCKETS: Final = ("client", "worker", "admin")


class RunDir:
    """A locked run directory. Closing it gives the lock back and removes the socket files."""

    def __init__(self, path: str) -> None:
        """Raises EngineError: `invalid` unless the directory is private, `unavailable` when an engine holds it."""
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except OSError as error:
            raise EngineError(Code.INVALID, f"cannot make {path}: {error.strerror}", "engine.run_dir") from error
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            message = f"{path} must belong to this user and be closed to others (chmod 700 {path})"
            raise EngineError(Code.INVALID, message, "engine.run_dir")
        self._lock = self._acquire()
        for name in SOCKETS:
            clear_stale_socket(self.path / name)

    def _acquire(self) -> int:
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "?"
            os.close(lock)
            message = f"another engine runs in {self.path} (pid {holder}); stop it or choose another run_dir"
            raise EngineError(Code.UNAVAILABLE, message, "engine.run_dir") from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def close(self) -> None:
        for name in SOCKETS:
            (self.path / name).unlink(missing_ok=True)
        os.close(self._lock)
