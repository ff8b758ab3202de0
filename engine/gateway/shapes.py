"""Owns how the events of a request look as server-sent events: chunks of chat and of plain completions.

Pure: events of the native client in, bytes out. Knows no socket. Called by the handlers, one shape per stream.
"""

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Final, Protocol

import msgspec

from engine.gateway import openai
from engine.gateway.reply import DONE, error_body, sse, status_of
from ipc.errors import EngineError
from ipc.messages import SAID, Delta, Echo, Ended, Event, TokenLogprob, Usage

MARK: Final = "@"
_MARK: Final = b'"@"'


class Shape(Protocol):
    """What a stream of one endpoint says at its beginning, for each event, at a fault and at its end."""

    num_tokens: int

    def start(self) -> bytes: ...
    def events(self, number: int, event: Event) -> bytes: ...
    def fail(self, error: EngineError) -> bytes: ...
    def finish(self) -> bytes: ...


class ChunkShape(ABC):
    """What chat and plain completions share. Ends with [DONE]."""

    kind = ""

    def __init__(self, name: str, created: int, asked: openai.Common) -> None:
        self._head = {"id": name, "object": self.kind, "created": created, "model": asked.model}
        told = asked.stream_options
        self._has_usage = told is not None and told.include_usage
        self._is_continuous = told is not None and told.continuous_usage_stats
        self._num_choices = asked.n or 1
        self._has_ids = asked.return_token_ids
        self._ids: list[int] = []  # of the present event, where they are told and are not yet
        self._prompt_tokens: dict[int, int] = {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # what stands around a text, by choice
        self.num_tokens = 0
        self._usages: list[Usage] = []

    def start(self) -> bytes:
        return b""

    def events(self, number: int, event: Event) -> bytes:
        """What one native event of prompt `number` becomes."""
        index = number * self._num_choices
        if isinstance(event, Echo):
            return self._chunk(index, event.text, event.logprobs)
        if not isinstance(event, SAID):
            return b""
        self.num_tokens += len(event.ids)
        if self._has_ids:
            self._ids = event.ids
        if isinstance(event, Delta):
            if event.prompt_tokens:
                self._prompt_tokens[number] = event.prompt_tokens
            return self._chunk(index + event.choice, event.text, event.logprobs, event.reasoning)
        if isinstance(event, Ended):
            index += event.choice
        else:
            self._usages.append(event.usage)
            self._prompt_tokens[number] = event.usage.prompt_tokens
            if self._num_choices > 1:  # each of them has ended
                return b""
        return self._chunk(index, event.text, event.logprobs, event.reasoning) + self._end(index, event.reason)

    @abstractmethod
    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob], thoughts: str = "") -> bytes: ...

    @abstractmethod
    def _end(self, index: int, reason: str) -> bytes: ...

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> dict[str, Any]: ...

    def _text(self, index: int, text: str) -> bytes:
        """A chunk of text and nothing else: all but the text is the same every time."""
        if self._is_continuous or self._ids:
            return self._event(self._text_choice(index, text))
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._event(self._text_choice(index, MARK)).rpartition(_MARK)
            frame = self._frames[index] = before, after
        return frame[0] + msgspec.json.encode(text) + frame[1]

    def _event(self, choice: dict[str, Any]) -> bytes:
        if self._ids:  # with the first chunk of their event
            choice, self._ids = {**choice, "token_ids": self._ids}, []
        told = {**self._head, "choices": [choice]}
        if self._is_continuous:
            prompt_tokens = sum(self._prompt_tokens.values())
            told["usage"] = openai.usage(Usage(prompt_tokens, self.num_tokens, 0))
        elif self._has_usage:
            told["usage"] = None
        return sse(told)

    def fail(self, error: EngineError) -> bytes:
        """A fault after the beginning: the last event."""
        return sse(error_body(error, status_of(error)))

    def finish(self) -> bytes:
        """The last events, with the usage where it was asked for."""
        if not self._has_usage:
            return DONE
        return sse({**self._head, "choices": [], "usage": openai.usage(openai.total(self._usages))}) + DONE


class ChatShape(ChunkShape):
    """chat.completion.chunk."""

    kind = "chat.completion.chunk"

    def __init__(self, name: str, created: int, asked: openai.ChatRequest) -> None:
        super().__init__(name, created, asked)
        self._has_logprobs = bool(asked.logprobs)
        self._has_reasoning = asked.include_reasoning is not False

    def _choice(self, index: int, delta: dict[str, str], reason: str | None, logprobs: Any = None) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def start(self) -> bytes:
        return b"".join(
            self._choice(index, {"role": "assistant", "content": ""}, None) for index in range(self._num_choices)
        )

    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob], thoughts: str = "") -> bytes:
        delta = {"reasoning_content": thoughts} if thoughts and self._has_reasoning else {}
        if text:
            delta["content"] = text
        if not delta and not logprobs and not self._ids:
            return b""
        if not thoughts and not self._has_logprobs:
            return self._text(index, text)
        told = openai.chat_logprobs(logprobs) if self._has_logprobs else None
        return self._choice(index, delta or {"content": ""}, None, told)

    def _end(self, index: int, reason: str) -> bytes:
        return self._choice(index, {}, reason)


class PlainShape(ChunkShape):
    """text_completion."""

    kind = "text_completion"

    def __init__(self, name: str, created: int, asked: openai.CompletionRequest) -> None:
        super().__init__(name, created, asked)
        self._num_top = asked.logprobs
        self._offsets: Counter[int] = Counter()

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob], thoughts: str = "") -> bytes:
        if not text and not logprobs and not self._ids:
            return b""
        if self._num_top is None:
            return self._text(index, text)
        told = openai.plain_logprobs(logprobs, self._num_top, self._offsets[index])
        self._offsets[index] += len(text)
        return self._event({"index": index, "text": text, "logprobs": told, "finish_reason": None})

    def _end(self, index: int, reason: str) -> bytes:
        return self._event({"index": index, "text": "", "logprobs": None, "finish_reason": reason})
