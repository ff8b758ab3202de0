"""Owns what could not be sent to one peer yet: a bounded queue of messages. Knows no socket. Called by the desk."""

from collections import deque
from collections.abc import Callable

from msgspec import Struct

Frames = list[bytes]


class OutboxStatistics(Struct, frozen=True):
    num_messages: int
    num_bytes: int


class Outbox:
    """At most `messages_max` messages of `bytes_max` bytes together, in order."""

    __slots__ = ("_bytes_max", "_messages", "_messages_max", "num_bytes")

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages: deque[Frames] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def push(self, message: Frames) -> bool:
        """Keep a message; False when that would break a bound, and then nothing changes."""
        size = sum(map(len, message))
        if len(self._messages) >= self._messages_max or self.num_bytes + size > self._bytes_max:
            return False
        self._messages.append(message)
        self.num_bytes += size
        return True

    def drain(self, send: Callable[[Frames], bool]) -> int:
        """Send from the front until `send` refuses; returns how many went."""
        num_sent = 0
        while self._messages and send(self._messages[0]):
            self.num_bytes -= sum(map(len, self._messages.popleft()))
            num_sent += 1
        return num_sent

    def statistics(self) -> OutboxStatistics:
        return OutboxStatistics(len(self._messages), self.num_bytes)
