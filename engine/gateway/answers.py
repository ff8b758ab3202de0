"""Owns the shapes of answers as the OpenAPI document states them. Tests hold every answer to them.

Knows no handler: answers are built where they are, these Structs describe them.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=0)]


class ErrorDetail(Struct):
    """What is wrong: `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """Every refusal."""

    error: ErrorDetail


class Health(Struct):
    """`status` is ok or unavailable; `engine` the state of the engine."""

    status: Literal["ok", "unavailable"]
    engine: str


class ModelAnswer(Struct):
    """A name that can be asked for; `root` is the route behind it."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    max_model_len: Count
    ready: bool


class ModelListAnswer(Struct):
    """All names."""

    object: Literal["list"]
    data: list[ModelAnswer]


class CachedTokens(Struct):
    cached_tokens: Count


class ReasoningTokens(Struct):
    reasoning_tokens: Count


class UsageAnswer(Struct):
    """Tokens of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TopToken(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChatToken(Struct):
    token: str
    logprob: float | None
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct):
    content: list[ChatToken]
    refusal: str | None


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str
    refusal: str | None
    reasoning_content: str = ""


class ChatChoice(Struct):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[Count] = field(default_factory=list)


class ChatAnswer(Struct):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class PlainLogprobs(Struct):
    """Columns, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Count]


class PlainChoice(Struct):
    index: Count
    text: str
    logprobs: PlainLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[Count] = field(default_factory=list)


class CompletionAnswer(Struct):
    """A whole plain completion."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[PlainChoice]
    usage: UsageAnswer


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class ResponseError(Struct):
    code: str
    message: str


class ResponsePart(Struct, kw_only=True):
    type: Literal["output_text", "reasoning_text", "input_text"]
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatToken] = field(default_factory=list)


class ResponseItem(Struct, kw_only=True):
    id: str
    type: Literal["message", "reasoning"]
    role: str = ""
    content: list[ResponsePart]
    status: str = ""
    summary: list[Any] = field(default_factory=list)


class Incomplete(Struct):
    reason: str


class ResponseAnswer(Struct, kw_only=True):
    """A response, as it stands."""

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: Incomplete | None
    model: str
    output: list[ResponseItem]
    metadata: dict[str, str]
    store: bool
    usage: ResponseUsage | None


class ResponseDeleted(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseInput(Struct):
    """The turns that a response answers."""

    object: Literal["list"]
    data: list[ResponseItem]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenizeAnswer(Struct):
    count: Count
    max_model_len: Count
    tokens: list[Count]


class DetokenizeAnswer(Struct):
    prompt: str
