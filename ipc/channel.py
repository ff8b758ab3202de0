"""Owns one ZeroMQ socket on an asyncio loop: receive until it is empty, send without ever blocking.

Knows frames, not messages. The socket's file descriptor is edge-triggered: it must be drained until EAGAIN, and
looked at again after every send. Called by the front, the gateway side of clients, and (without a loop) by workers.
"""

import asyncio
import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec
import zmq

from ipc.errors import Code, EngineError

Frames = list[bytes]

SAFETY_POLL_S: Final = 0.05
TURN_MAX: Final = 256  # messages handled before other work of the loop gets its turn
LINGER_MS: Final = 200
HANDSHAKE_MS: Final = 2000
SOCKET_PATH_MAX: Final = 107  # bytes in sockaddr_un.sun_path less the terminating zero


# pyzmq builds an enum per `|`, per `&` and per option that is asked for: a message of five frames pays 10 us for it.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)
_send: Final = zmq.backend.Socket.send


def _send_frames(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    for frame in frames[:-1]:
        _send(socket, frame, _MORE)
    _send(socket, frames[-1], _NOBLOCK)


def _receive_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """A frame says itself whether more follow; asking the socket costs more than the frame."""
    frame = socket.recv(_NOBLOCK, False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, False)
        frames.append(frame.bytes)
    return frames


def _receive_signed(socket: zmq.Socket[bytes]) -> tuple[list[bytes], str]:
    """As `_receive_frames`, and the user id that the handshake gave to the peer: its public CURVE key."""
    frame = socket.recv(_NOBLOCK, False)
    user = str(frame.get("User-Id"))
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, False)
        frames.append(frame.bytes)
    return frames, user


class Sent(Enum):
    """What became of a message handed to `send_nowait`."""

    YES = "yes"
    FULL = "full"  # the peer does not read: keep it in an outbox or drop it
    GONE = "gone"  # no such peer any more


class ChannelStatistics(msgspec.Struct, frozen=True):
    num_received: int
    num_sent: int
    num_full: int
    num_gone: int
    num_rescued: int  # messages only the safety poll found; > 0 is worth a look


def ipc_address(run_dir: str, name: str) -> str:
    """`ipc://` address of a socket in a run directory. Raises EngineError when the path does not fit the kernel."""
    path = str(Path(run_dir) / name)
    size = len(path.encode())
    if size > SOCKET_PATH_MAX:
        message = f"the socket path {path} has {size} bytes; a unix socket path may have {SOCKET_PATH_MAX}"
        raise EngineError(Code.INVALID, message, "run_dir")
    return f"ipc://{path}"


def user_run_dir() -> str:
    """Where an engine of this user listens when nobody says otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return str(Path(runtime) / "engine") if runtime else f"/tmp/engine-{os.getuid()}"


def default_run_dir() -> str:
    """Where to look for an engine: $ENGINE_RUN_DIR, or this user's place."""
    return os.environ.get("ENGINE_RUN_DIR") or user_run_dir()


def client_address(run_dir: str | None = None) -> str:
    """Address of the client socket in `run_dir`."""
    return ipc_address(run_dir or default_run_dir(), "client")


def clear_stale_socket(path: Path) -> None:
    """Remove the socket file that a killed process left. Call it only under the run directory's lock.

    Raises EngineError when something that is not a socket lies there: that is never deleted.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EngineError(Code.INVALID, f"{path} exists and is not a socket; move it away", "run_dir")
        path.unlink()


def router(context: zmq.Context[zmq.Socket[bytes]], message_bytes_max: int, send_hwm: int) -> zmq.Socket[bytes]:
    """A ROUTER that reports unknown peers, never hands an identity over, and bounds what a peer may send."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 1024)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
    _bound(socket, send_hwm)
    return socket


class Curve(msgspec.Struct, frozen=True):
    """What a client needs over TCP: the engine's public key and a key pair of its own, each 40 characters."""

    server: str
    public: str
    secret: str


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], send_hwm: int = 1000, identity: bytes = b"", curve: Curve | None = None
) -> zmq.Socket[bytes]:
    """A DEALER; only workers name themselves, everyone else leaves `identity` to libzmq."""
    socket = context.socket(zmq.DEALER)
    if curve is not None:
        try:
            socket.curve_serverkey = curve.server.encode()
            socket.curve_publickey, socket.curve_secretkey = curve.public.encode(), curve.secret.encode()
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            socket.close(0)
            raise EngineError(Code.INVALID, "a CURVE key has 40 characters of Z85", "curve") from error
    if identity:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    _bound(socket, send_hwm)
    return socket


def _bound(socket: zmq.Socket[bytes], send_hwm: int) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.SNDHWM, send_hwm)
    socket.setsockopt(zmq.RCVHWM, 1000)


class Channel:
    """One ROUTER or DEALER. `attach` gives it a loop; without one, `receive_nowait` is called by hand."""

    __slots__ = (
        "_full",
        "_gone",
        "_handler",
        "_is_closed",
        "_is_draining",
        "_loop",
        "_received",
        "_rescued",
        "_safety",
        "_sent",
        "has_users",
        "socket",
        "user",
    )

    def __init__(self, socket: zmq.Socket[bytes], has_users: bool = False) -> None:
        """With `has_users`, `user` is who sent the message that is being handled: the socket is one with CURVE."""
        self.socket = socket
        self.has_users = has_users
        self.user = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[Frames], None] | None = None
        self._safety: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_closed = False
        self._received = self._sent = self._full = self._gone = self._rescued = 0

    def attach(self, loop: asyncio.AbstractEventLoop, handler: Callable[[Frames], None]) -> None:
        """Call `handler` with the frames of every message from now on. A ROUTER's first frame is the peer."""
        self._loop = loop
        self._handler = handler
        loop.add_reader(self._descriptor(), self._drain)
        self._arm_safety_poll()
        loop.call_soon(self._drain)

    def _descriptor(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def receive_nowait(self) -> Frames | None:
        """The next message, or None when there is none."""
        try:
            frames = _receive_frames(self.socket)
        except zmq.Again:
            return None
        self._received += 1
        return frames

    def send_nowait(self, frames: Frames) -> Sent:
        """Hand a message to libzmq. Never blocks; raises zmq.ZMQError only for faults of our own."""
        try:
            _send_frames(self.socket, frames)
        except zmq.Again:
            self._full += 1
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._gone += 1
            return Sent.GONE
        self._sent += 1
        # Sending may have taken the edge that announced input: look once, after all sends of this turn.
        if self._loop is not None and not self._is_draining:
            self._is_draining = True
            self._loop.call_soon(self._drain)
        return Sent.YES

    def _has_input(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _drain(self) -> None:
        handler = self._handler
        if self._is_closed or handler is None or self._loop is None:
            return
        self._is_draining = True  # sends made by the handler need not look for input: this loop does
        socket = self.socket
        try:
            for _ in range(TURN_MAX):
                try:
                    if self.has_users:
                        frames, self.user = _receive_signed(socket)
                    else:
                        frames = _receive_frames(socket)
                except zmq.Again:
                    self._is_draining = False
                    return
                self._received += 1
                handler(frames)
                if self.is_closed:
                    return
        except BaseException:
            self._loop.call_soon(self._drain)
            raise
        self._loop.call_soon(self._drain)

    def _arm_safety_poll(self) -> None:
        if self._loop is not None and not self._is_closed:
            self._safety = self._loop.call_later(SAFETY_POLL_S, self._on_safety_poll)

    def _on_safety_poll(self) -> None:
        if not self._is_draining:
            before = self._received
            self._drain()
            self._rescued += self._received - before
        self._arm_safety_poll()

    def detach(self) -> None:
        """Leave the loop; the socket stays open. Safe to call twice."""
        if self._safety is not None:
            self._safety.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor())
        self._loop = self._handler = self._safety = None

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Detach from the loop and close the socket; unsent messages get `linger_ms`. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.detach()
        self.socket.close(linger_ms)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._received, self._sent, self._full, self._gone, self._rescued)
