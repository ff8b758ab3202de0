"""Owns what a worker keeps per request beside its sequence: text in the making, and the entries of one step.

Knows no socket and no scheduler. Called by `worker/loop.py`. Text sent after n ids is a pure function of those ids.
"""

from dataclasses import dataclass, field

from engine.llm.detokenizer import Detokenizer
from ipc import codec
from ipc.messages import Delta, Emissions, Ending, Event, EventsHead, Kind, Outcome

_EMISSIONS = codec.ENVELOPES[Kind.EMISSIONS]


@dataclass(slots=True)
class Live:
    """One request in this worker. `held` collects the text and ids of a whole (not streamed) answer."""

    number: int
    attempt: int
    session: int
    name: str
    detokenizer: Detokenizer
    is_stream: bool
    num_emitted: int = 0
    held_text: list[str] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)


class StepEntries:
    """The entries that one step owes to one session, as the columns of an Emissions message."""

    __slots__ = ("attempts", "counts", "endings", "ids", "indexes", "lengths", "numbers", "payloads", "session")

    def __init__(self, session: int) -> None:
        self.session = session
        self.numbers: list[int] = []
        self.attempts: list[int] = []
        self.indexes: list[int] = []
        self.counts: list[int] = []
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.payloads: list[bytes] = []
        self.endings: list[Ending] = []

    def _add(self, number: int, attempt: int, index: int, ids: list[int], payload: bytes) -> None:
        self.numbers.append(number)
        self.attempts.append(attempt)
        self.indexes.append(index)
        self.counts.append(len(ids))
        self.ids += ids
        self.lengths.append(len(payload))
        if payload:
            self.payloads.append(payload)

    def add_delta(self, live: Live, ids: list[int], text: str) -> None:
        """More of a request. A whole answer's text waits here for its end; the front gets the ids all the same."""
        index = live.num_emitted
        live.num_emitted = index + len(ids)
        if live.is_stream:
            payload = codec.encode(Delta(live.name, index, text, ids))
        else:
            payload = b""
            live.held_text.append(text)
            live.held_ids += ids
        self._add(live.number, live.attempt, index, ids, payload)

    def add_end(self, live: Live, ids: list[int], event: Event, outcome: Outcome, num_prompt_tokens: int) -> None:
        """The last entry of a request: `event` is its final message, `ids` what it adds to the journal."""
        self.endings.append(Ending(len(self.numbers), outcome, num_prompt_tokens))
        self._add(live.number, live.attempt, live.num_emitted, ids, codec.encode(event))
        live.num_emitted += len(ids)

    def add_withdrawn(self, number: int, attempt: int, index: int) -> None:
        """A seat is free because the front asked for it; the client hears nothing from here."""
        self.endings.append(Ending(len(self.numbers), Outcome.WITHDRAWN))
        self._add(number, attempt, index, [], b"")

    def frames(self, epoch: int, step: int) -> list[bytes]:
        """The message to the front: its own head, then the head and the payloads it forwards unread."""
        head = Emissions(
            epoch,
            step,
            self.session,
            self.numbers,
            self.attempts,
            self.indexes,
            self.counts,
            self.ids,
            self.lengths,
            self.endings,
        )
        client_head = EventsHead([length for length in self.lengths if length])
        return [_EMISSIONS, codec.encode(head), codec.encode(client_head), b"".join(self.payloads)]
