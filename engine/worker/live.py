"""Owns what a worker keeps per request beside its sequences: text in the making, and the entries of one step.

Knows no socket and no scheduler. Called by `worker/loop.py`. Text sent after n ids is a pure function of those ids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.llm.detokenizer import Detokenizer
from engine.llm.reasoning import Reasoning
from engine.llm.runner import Logprob
from engine.llm.sequence import Sequence
from ipc import codec
from ipc.messages import (
    Delta,
    Echo,
    Emissions,
    Ended,
    Ending,
    Event,
    EventsHead,
    Finished,
    Kind,
    Outcome,
    TokenLogprob,
    TopLogprob,
    Usage,
)

ECHO_TOKENS: Final = 512  # of a prompt in one event
_EMISSIONS = codec.ENVELOPES[Kind.EMISSIONS]


@dataclass(slots=True)
class Answer:
    """One choice of a request. `held` collects the text and ids of a whole (not streamed) answer."""

    sequence: Sequence
    detokenizer: Detokenizer
    reason: str = ""  # of its end
    held_text: list[str] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    held_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_emitted: int = 0
    last_at: float = 0.0  # when its last token was committed
    reasoning: Reasoning | None = None  # where what the model thinks is told apart
    held_thoughts: list[str] = field(default_factory=list)
    num_thought: int = 0  # tokens

    def split(self, num_ids: int, text: str, is_last: bool) -> tuple[str, str]:
        """What of its text is thought, and what is said. A token counts as thought while thoughts are open after it."""
        if self.reasoning is None:
            return "", text
        thoughts, said = self.reasoning.push(text)
        if self.reasoning.is_inside:
            self.num_thought += num_ids
        if is_last:
            rest = self.reasoning.finish()
            thoughts, said = thoughts + rest[0], said + rest[1]
        return thoughts, said


@dataclass(slots=True)
class Live:
    """One request in this worker. `prompt_scores` grows while a scored prompt is computed."""

    number: int
    attempt: int
    session: int
    name: str
    is_stream: bool = True
    is_echo: bool = False
    prompt_text: str = ""
    answers: list[Answer] = field(default_factory=list)
    prompt_scores: list[Logprob] = field(default_factory=list)
    has_echoed: bool = False

    @property
    def usage(self) -> Usage:
        first = self.answers[0].sequence
        num_completion = sum(answer.num_emitted for answer in self.answers)
        num_thought = sum(answer.num_thought for answer in self.answers)
        return Usage(first.num_prompt_tokens, num_completion, first.num_cached_tokens, num_thought)


def told(logprob: Logprob, token_bytes: Callable[[int], bytes]) -> TokenLogprob:
    """A log probability as clients get it."""
    top = [TopLogprob(id, token_bytes(id), value) for id, value in logprob.top]
    return TokenLogprob(logprob.id, token_bytes(logprob.id), logprob.logprob, top)


class StepEntries:
    """The entries that one step owes to one session, as the columns of an Emissions message."""

    __slots__ = (
        "attempts",
        "choices",
        "counts",
        "endings",
        "ids",
        "indexes",
        "lengths",
        "numbers",
        "payloads",
        "session",
    )

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
        self.choices: list[int] = []

    def _add(self, live: Live, index: int, ids: list[int], payload: bytes, choice: int = 0) -> None:
        if choice and not self.choices:
            self.choices = [0] * len(self.numbers)  # until now all were choice 0, which goes without saying
        if self.choices or choice:
            self.choices.append(choice)
        self.numbers.append(live.number)
        self.attempts.append(live.attempt)
        self.indexes.append(index)
        self.counts.append(len(ids))
        self.ids += ids
        self.lengths.append(len(payload))
        if payload:
            self.payloads.append(payload)

    def add_echo(self, live: Live, token_bytes: Callable[[int], bytes]) -> None:
        """The prompt, once, in pieces, with its log probabilities where it was scored."""
        live.has_echoed = True
        sequence = live.answers[0].sequence
        ids, text = sequence.token_ids[: sequence.num_prompt_tokens], live.prompt_text
        scores: list[TokenLogprob] = []
        if sequence.is_scored:
            scores = [TokenLogprob(ids[0], token_bytes(ids[0]), None)]
            scores += [told(score, token_bytes) for score in live.prompt_scores]
        for at in range(0, len(ids), ECHO_TOKENS):
            end = at + ECHO_TOKENS
            event = Echo(live.name, at, text, ids[at:end], scores[at:end])
            self._add(live, live.answers[0].num_emitted, [], codec.encode(event))
            text = ""

    def add_delta(self, live: Live, answer: Answer, ids: list[int], text: str, logprobs: list[TokenLogprob]) -> None:
        """More of an answer. A whole one's text waits here for its end; the front gets the ids all the same."""
        index, choice = answer.num_emitted, answer.sequence.choice
        answer.num_emitted = index + len(ids)
        thoughts, text = answer.split(len(ids), text, False)
        if live.is_stream:
            prompt_tokens = 0 if index or choice else answer.sequence.num_prompt_tokens
            payload = codec.encode(Delta(live.name, index, text, ids, choice, logprobs, prompt_tokens, thoughts))
        else:
            payload = b""
            answer.held_text.append(text)
            answer.held_thoughts.append(thoughts)
            answer.held_ids += ids
            answer.held_logprobs += logprobs
        self._add(live, index, ids, payload, choice)

    def add_last(self, live: Live, answer: Answer, ids: list[int], text: str, logprobs: list[TokenLogprob]) -> None:
        """The end of an answer, which is the end of its request when the others have ended."""
        index, choice = answer.num_emitted, answer.sequence.choice
        answer.num_emitted = index + len(ids)
        start = index if live.is_stream else 0
        thoughts, text = answer.split(len(ids), text, True)
        text, thoughts = "".join(answer.held_text) + text, "".join(answer.held_thoughts) + thoughts
        whole_ids, whole_logprobs = answer.held_ids + ids, answer.held_logprobs + logprobs
        matched, reason = answer.detokenizer.matched or "", answer.reason
        seed = answer.sequence.seed
        if len(live.answers) == 1:
            event = Finished(
                live.name, start, text, whole_ids, reason, live.usage, seed, matched, whole_logprobs, thoughts
            )
            self._end(live, Outcome.FINISHED)
            self._add(live, index, ids, codec.encode(event))
            return
        ended = Ended(live.name, start, text, whole_ids, choice, reason, matched, whole_logprobs, thoughts)
        self._add(live, index, ids, codec.encode(ended), choice)
        if all(each.reason for each in live.answers):
            first = live.answers[0]
            finished = Finished(live.name, first.num_emitted, "", [], first.reason, live.usage, seed)
            self._end(live, Outcome.FINISHED)
            self._add(live, first.num_emitted, [], codec.encode(finished))

    def _end(self, live: Live, outcome: Outcome) -> None:
        """The next entry is the last of this request."""
        position = len(self.numbers)
        if live.answers:
            first = live.answers[0]
            told = first.sequence.num_prompt_tokens, first.sequence.num_cached_tokens, first.reason
            self.endings.append(Ending(position, outcome, *told))
        else:
            self.endings.append(Ending(position, outcome))

    def add_failure(self, live: Live, event: Event, outcome: Outcome) -> None:
        """The last entry of a request that broke or was refused."""
        self._end(live, outcome)
        self._add(live, live.answers[0].num_emitted if live.answers else 0, [], codec.encode(event))

    def add_withdrawn(self, live: Live) -> None:
        """A seat is free because the front asked for it; the client hears nothing from here."""
        self._end(live, Outcome.WITHDRAWN)
        self._add(live, live.answers[0].num_emitted if live.answers else 0, [], b"")

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
            self.choices,
        )
        client_head = EventsHead([length for length in self.lengths if length])
        return [_EMISSIONS, codec.encode(head), codec.encode(client_head), b"".join(self.payloads)]
