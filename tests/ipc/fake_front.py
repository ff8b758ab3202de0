"""Owns a front that says what a test tells it to, on a real ROUTER, in a thread of its own."""

import threading
from collections.abc import Callable

import zmq

from ipc import codec
from ipc.messages import Empty, Kind, Welcome


class FakeFront:
    """`answer(kind, identity, message)` gives the messages to send back; None says nothing at all, not even WELCOME."""

    def __init__(self, address: str, answer: Callable[[Kind, bytes, list[bytes]], list[list[bytes]]] | None) -> None:
        self.address = address
        self._answer = answer
        self.heard: list[Kind] = []
        self.is_deaf = False
        self._context: zmq.Context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> "FakeFront":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            identity, *message = self._socket.recv_multipart()
            kind = codec.kind_of(message)
            self.heard.append(kind)
            if self._answer is None or self.is_deaf:
                continue
            replies = self._answer(kind, identity, message)
            if kind is Kind.HELLO and not replies:
                replies = [codec.message(Kind.WELCOME, None, Welcome(1, 0, 1, 0.2, 5, 1 << 20, 100))]
            if kind is Kind.PING and not replies:
                replies = [codec.message(Kind.PONG, None, Empty())]
            for reply in replies:
                self._socket.send_multipart([identity, *reply])
        self._context.destroy(0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
