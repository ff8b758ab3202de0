"""Owns the shapes of /v1/responses: what may be asked, the response object, and the events of its stream.

Pure: Structs in, options of the native client out, and back. Knows no socket. What is kept of a response is its note,
written here, beside the events that the engine keeps; an object built from those equals the one its stream ended with.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from engine.gateway import openai
from engine.gateway.reply import invalid, sse
from ipc.errors import Code, EngineError
from ipc.messages import LOGPROBS_MAX, Delta, Event, Finished, Message, TemplateArgs, Usage
from ipc.streams import Choice, Options, Stored

KEEP_S: Final = 604_800.0  # the engine's own bound is less
TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text"})
LOGPROBS: Final = "message.output_text.logprobs"
ENDS: Final = {"stop": "completed", "length": "incomplete"}


class InputItem(Struct, frozen=True):
    """One item of the input: a message, or a thought of an earlier answer, which is left out."""

    type: str = "message"
    role: str = ""
    content: str | Annotated[list[openai.Part], Meta(max_length=1024)] | None = None


class TextOptions(Struct, frozen=True):
    """Only plain text is built."""

    format: openai.ResponseFormat | None = None


class ResponsesRequest(openai.Common, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: TemplateArgs | None = None
    conversation: openai.Unbuilt = UNSET
    prompt: openai.Unbuilt = UNSET


class Note(Struct, frozen=True):
    """What is kept of a response beside its events: the object as it began, and the conversation it answers."""

    response: dict[str, Any]
    messages: list[Message]


def is_stored(request: ResponsesRequest) -> bool:
    """Kept unless told otherwise."""
    return request.store is not False


def messages(request: ResponsesRequest) -> list[Message]:
    """The turns of the input. Raises EngineError naming the item."""
    if isinstance(request.input, str):
        return [Message("user", request.input)]
    turns = []
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        if item.type == "reasoning":
            continue
        if item.type != "message":
            raise invalid(f"{where}.type", f"items of type {item.type[:64]!r} are not built")
        content = item.content
        if isinstance(content, list):
            for at, part in enumerate(content):
                if part.type not in TEXT_PARTS:
                    told = f"parts of type {part.type[:64]!r} are not built"
                    raise invalid(f"{where}.content[{at}].type", told)
                if part.text is None:
                    raise invalid(f"{where}.content[{at}].text", "a text part without text")
            content = "".join(part.text or "" for part in content)
        if not 1 <= len(item.role) <= 64:
            raise invalid(f"{where}.role", "a role has 1 to 64 characters")
        turns.append(Message(item.role, content or ""))
    if not turns:
        raise invalid("input", "the input is empty")
    return turns


def options(request: ResponsesRequest, turns: list[Message]) -> Options:
    """The native options of a response to these turns. Raises EngineError naming the field."""
    for name in ("conversation", "prompt"):
        if openai.says(getattr(request, name)):
            raise invalid(name, f"{name} is not built")
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        raise invalid("text.format", f"format {request.text.format.type[:64]!r} is not built; text is")
    if request.truncation == "auto":
        raise invalid("truncation", "truncation is not built; an input that is too long is refused")
    if (request.n or 1) != 1:
        raise invalid("n", "a response has one answer")
    if request.background and not is_stored(request):
        raise invalid("background", "a background response is one that is stored")
    made = openai.options(request, None)
    if request.max_output_tokens is not None:
        made["max_tokens"] = request.max_output_tokens
    if has_logprobs(request):
        made["logprobs"] = request.top_logprobs or 0
    system = [Message("system", request.instructions)] if request.instructions else []
    made["messages"] = [*system, *turns]
    made["template_args"] = request.chat_template_kwargs or {}
    return made


def has_logprobs(request: ResponsesRequest) -> bool:
    return LOGPROBS in (request.include or [])


def begin(request: ResponsesRequest, name: str, created: int) -> dict[str, Any]:
    """The response object before anything has happened."""
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "queued",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": is_stored(request),
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def usage(told: Usage) -> dict[str, Any]:
    return {
        "input_tokens": told.prompt_tokens,
        "input_tokens_details": {"cached_tokens": told.cached_tokens},
        "output_tokens": told.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": told.reasoning_tokens},
        "total_tokens": told.prompt_tokens + told.completion_tokens,
    }


def _id(prefix: str, response: dict[str, Any]) -> str:
    return f"{prefix}_{str(response['id']).removeprefix('resp_')}"


def _thought_item(response: dict[str, Any], text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": _id("rs", response), "type": "reasoning", "summary": [], "content": content, "status": status}


def _text_part(text: str, choice: Choice | None = None) -> dict[str, Any]:
    logprobs = openai.chat_logprobs(choice.logprobs)["content"] if choice is not None else []
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(response: dict[str, Any], content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    made = {"id": _id("msg", response), "type": "message", "role": "assistant", "status": status}
    return {**made, "content": content}


def finish(response: dict[str, Any], choice: Choice, told: Usage) -> dict[str, Any]:
    """The object of a response that ran to its end."""
    status = ENDS.get(choice.reason, "completed")
    output = [_thought_item(response, choice.reasoning, "completed")] if choice.reasoning else []
    output.append(_message_item(response, [_text_part(choice.text, choice)], status))
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {**response, "status": status, "incomplete_details": details, "output": output, "usage": usage(told)}


def fail(response: dict[str, Any], error: EngineError) -> dict[str, Any]:
    """The object of a response that broke."""
    return {**response, "status": "failed", "error": {"code": error.code.value, "message": error.message}}


def of_stored(kept: Stored) -> dict[str, Any]:
    """The object of a response as the engine keeps it."""
    response = read_note(kept.note).response
    if kept.state in {"queued", "cancelled"}:
        return {**response, "status": kept.state}
    if not kept.is_over:
        return {**response, "status": "in_progress"}
    try:
        completion = kept.completion()
    except EngineError as error:
        return fail(response, error)
    return finish(response, completion.choices[0], completion.usage)


def read_note(note: bytes) -> Note:
    """Raises EngineError `not_found` for a kept request that is no response."""
    try:
        return msgspec.json.decode(note, type=Note)
    except msgspec.DecodeError:
        raise EngineError(Code.NOT_FOUND, "no such response is kept", "response_id") from None


def conversation(kept: Stored) -> list[Message]:
    """The turns up to the answer of a kept response, for the next. Raises EngineError when there is no answer."""
    if not kept.is_over:
        raise invalid("previous_response_id", f"that response is {kept.state}")
    try:
        answer = kept.completion()
    except EngineError as error:
        raise invalid("previous_response_id", f"that response has no answer: {error.message}") from error
    return [*read_note(kept.note).messages, Message("assistant", answer.text)]


def input_items(kept: Stored) -> dict[str, Any]:
    """The turns that a response answers, as a list object."""
    turns = read_note(kept.note).messages
    data = [
        {
            "id": f"msg_{index}",
            "type": "message",
            "role": turn.role,
            "content": [{"type": "output_text" if turn.role == "assistant" else "input_text", "text": turn.content}],
        }
        for index, turn in enumerate(turns)
    ]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": False, **ends}


class ResponseShape:
    """The events of one response: named, numbered, and without a [DONE]."""

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = {**response, "status": "in_progress"}
        self._number = 0
        self._index = 0  # of the output item that is open
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._is_thinking = self._is_saying = False
        self.num_tokens = 0

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": name, "sequence_number": number, **fields}, name)

    def start(self) -> bytes:
        made = self._event("response.created", response=self._response)
        return made + self._event("response.in_progress", response=self._response)

    def events(self, number: int, event: Event) -> bytes:
        """What one native event becomes; `number` is always 0."""
        if not isinstance(event, Delta | Finished):
            return b""
        self.num_tokens += len(event.ids)
        made = b""
        if event.reasoning:
            made += self._think(event.reasoning)
        if event.text or (event.logprobs and self._is_saying):
            made += self._say(event)
        if isinstance(event, Finished):
            made += self._end(event)
        return made

    def _think(self, text: str) -> bytes:
        made = b""
        if not self._is_thinking:
            self._is_thinking = True
            item = _thought_item(self._response, "", "in_progress")
            made = self._event("response.output_item.added", output_index=0, item=item)
        self._thoughts.append(text)
        where = {"item_id": _id("rs", self._response), "output_index": 0, "content_index": 0}
        return made + self._event("response.reasoning_text.delta", **where, delta=text)

    def _end_thoughts(self) -> bytes:
        if not self._is_thinking:
            return b""
        self._is_thinking, self._index = False, 1
        text = "".join(self._thoughts)
        where = {"item_id": _id("rs", self._response), "output_index": 0, "content_index": 0}
        made = self._event("response.reasoning_text.done", **where, text=text)
        item = _thought_item(self._response, text, "completed")
        return made + self._event("response.output_item.done", output_index=0, item=item)

    def _where(self) -> dict[str, Any]:
        return {"item_id": _id("msg", self._response), "output_index": self._index, "content_index": 0}

    def _begin_message(self) -> bytes:
        if self._is_saying:
            return b""
        made = self._end_thoughts()
        self._is_saying = True
        item = _message_item(self._response, [], "in_progress")
        made += self._event("response.output_item.added", output_index=self._index, item=item)
        return made + self._event("response.content_part.added", **self._where(), part=_text_part(""))

    def _say(self, event: Delta | Finished) -> bytes:
        made = self._begin_message()
        logprobs = openai.chat_logprobs(event.logprobs)["content"]
        self._texts.append(event.text)
        self._logprobs += event.logprobs
        return made + self._event("response.output_text.delta", **self._where(), delta=event.text, logprobs=logprobs)

    def _end(self, event: Finished) -> bytes:
        made = self._begin_message()
        text = "".join(self._texts)
        choice = Choice(text, [], event.reason, event.matched, self._logprobs, "".join(self._thoughts))
        told = finish(self._response, choice, event.usage)
        item = told["output"][-1]
        part = item["content"][0]
        made += self._event("response.output_text.done", **self._where(), text=text, logprobs=part["logprobs"])
        made += self._event("response.content_part.done", **self._where(), part=part)
        made += self._event("response.output_item.done", output_index=self._index, item=item)
        return made + self._event(f"response.{told['status']}", response=told)

    def fail(self, error: EngineError) -> bytes:
        """A fault after the beginning: the last event."""
        return self._event("response.failed", response=fail(self._response, error))

    def finish(self) -> bytes:
        return b""
