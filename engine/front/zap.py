"""Owns who passes the CURVE handshake: the answers to libzmq's own questions (ZAP, ZeroMQ RFC 27).

Knows no session. On the loop of the front: when that stands still nobody new is let in. A peer whose public key is not
in the file never reaches the application; one that is, is known by that key (libzmq's User-Id) from then on.
"""

import asyncio
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

import structlog
import zmq
import zmq.utils.z85

from engine.keys import Key
from ipc.channel import Channel, Frames

log = structlog.get_logger("front")

ADDRESS: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"
DOMAIN: Final = "engine"
FRAMES: Final = 9  # routing id, delimiter, version, request id, domain, address, identity, mechanism, credentials


def answer(frames: Frames, keys: Set[str]) -> Frames:
    """The reply to one question: status 200 with the public key as user id, or 400. Pure."""
    head = [frames[0], b"", VERSION, frames[3] if len(frames) > 3 else b""]
    if len(frames) == FRAMES and frames[2] == VERSION and frames[4] == DOMAIN.encode() and frames[7] == b"CURVE":
        public = zmq.utils.z85.encode(frames[8]).decode() if len(frames[8]) == 32 else ""
        if public in keys:
            return [*head, b"200", b"OK", public.encode(), b""]
    return [*head, b"400", b"not known here", b"", b""]


@dataclass(frozen=True, slots=True)
class Remote:
    """The socket for peers of other machines, who they may be by public key, and what answers for them."""

    channel: Channel
    keys: dict[str, Key]
    zap: "Zap"


class Zap:
    """Answers for one context. Bind it before the socket that it guards."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Set[str]) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.bind(ADDRESS)
        self._channel = Channel(socket)
        self._keys = keys

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._channel.attach(loop, self._on_question)

    def _on_question(self, frames: Frames) -> None:
        reply = answer(frames, self._keys)
        if reply[4] != b"200":
            address = frames[5].decode("ascii", "replace")[:64] if len(frames) > 5 else ""
            log.warning("curve_peer_refused", address=address)
        self._channel.send_nowait(reply)

    def close(self) -> None:
        self._channel.close()


def guard(socket: zmq.Socket[bytes], secret: str) -> None:
    """Make a socket a CURVE server whose peers are asked about here."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
