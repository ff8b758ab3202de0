"""Owns how the engine speaks to the service manager that started it: systemd's notification protocol, by hand.

Knows the socket and no meaning of what is said over it (`supervisor/herald.py` decides that). Used by `serve` and the
supervisor from the main process, whose pid the manager checks. Whatever is wrong with the socket, the engine goes on.
"""

import os
import socket
from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import Final

KEPT_MAX: Final = 64
VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Datagrams to a service manager. `is_on` is false when nobody listens, and then nothing happens."""

    def __init__(self, address: str, watchdog_s: float = 0.0) -> None:
        """`address`: a path, or @name for an abstract one; `watchdog_s`: silence that it kills for, 0 for never."""
        self.is_on = address.startswith(("/", "@"))
        self.watchdog_s = watchdog_s if self.is_on else 0.0
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._kept: deque[bytes] = deque(maxlen=KEPT_MAX)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if self.is_on else None

    def tell(self, lines: Sequence[str]) -> None:
        """One datagram that is kept, and sent after those before it, while the manager does not read."""
        self._kept.append("\n".join(lines).encode())
        self.flush()

    def pulse(self, lines: Sequence[str]) -> None:
        """One datagram that is worth nothing later: not kept."""
        self.flush()
        if not self._kept:
            self._send("\n".join(lines).encode())

    def flush(self) -> None:
        """Try again what could not be sent."""
        while self._kept and self._send(self._kept[0]):
            self._kept.popleft()

    def _send(self, datagram: bytes) -> bool:
        """False when it should be tried again. A manager that is gone will not ask what it missed."""
        if self._socket is None:
            return True
        try:
            # To its address each time, unconnected: a manager that starts itself again binds the same path anew.
            self._socket.sendto(datagram, self._address)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def from_environment(environ: MutableMapping[str, str] = os.environ) -> Notifier:
    """The notifier that the environment describes. Takes its variables out, so that no child speaks for the engine."""
    address, usec, pid = (environ.pop(name, "") for name in VARIABLES)
    is_ours = pid in {"", str(os.getpid())}
    watchdog_s = int(usec) / 1e6 if is_ours and usec.isascii() and usec.isdigit() else 0.0
    return Notifier(address, watchdog_s)
