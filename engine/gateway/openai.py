"""Owns the OpenAI shapes: what a request may say, what it means to the engine, what its answers look like.

Pure: Structs in, options of the native client out, and back. Knows no socket and no HTTP. What changes the meaning of a
request and is not built is refused by name; other unknown fields are ignored.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from engine.gateway.reply import invalid
from ipc.messages import (
    CHOICES_MAX,
    LOGPROBS_MAX,
    Bias,
    Message,
    Penalty,
    TemplateArgs,
    TokenId,
    TokenIds,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from ipc.streams import Choice, Completion, Options

PROMPTS_MAX: Final = 128
STOPS_MAX: Final = 16
COMPLETION_TOKENS: Final = 16  # what a completion without max_tokens is given, as the original API does
NOTHING: Final = (b"", b"null", b"[]", b"{}")

Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
MaxTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


# A field that is read only to be refused when it says something.
Unbuilt = Raw | UnsetType


def says(value: Unbuilt, *harmless: bytes) -> bool:
    """Whether a field that is not built asks for something."""
    return not isinstance(value, UnsetType) and bytes(value) not in {*NOTHING, *harmless}


class StreamOptions(Struct, frozen=True):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Part(Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    """One turn. Content is a text, a list of text parts, or nothing."""

    role: str
    content: str | Annotated[list[Part], Meta(max_length=1024)] | None = None
    tool_calls: Unbuilt = UNSET
    function_call: Unbuilt = UNSET
    audio: Unbuilt = UNSET


class ResponseFormat(Struct, frozen=True):
    """Only text is built."""

    type: str


class Common(Struct, frozen=True):
    """What chat and plain completions share. Bounds are those of the engine's own request."""

    model: Annotated[str, Meta(max_length=256)]
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=1_048_576)] = 0
    priority: Annotated[str, Meta(max_length=16)] = ""
    deadline_ms: Annotated[int, Meta(ge=0, le=604_800_000)] = 0
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    session: Annotated[str, Meta(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    tools: Unbuilt = UNSET
    tool_choice: Unbuilt = UNSET
    functions: Unbuilt = UNSET
    function_call: Unbuilt = UNSET


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    modalities: Annotated[list[str], Meta(max_length=8)] | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateArgs | None = None
    audio: Unbuilt = UNSET


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions. A prompt is a text, token ids, or a list of either."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=1_048_576)]
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool = False
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    suffix: str | None = None
    parse_special: bool = False


def _refuse_unbuilt(request: Common) -> None:
    """Fields that change the meaning of a request and are not built."""
    if request.response_format is not None and request.response_format.type != "text":
        raise invalid("response_format", f"response_format {request.response_format.type!r} is not built; text is")
    for name in ("tools", "functions", "function_call"):
        if says(getattr(request, name)):
            raise invalid(name, f"{name} is not built")
    if says(request.tool_choice, b'"none"', b'"auto"'):
        raise invalid("tool_choice", "tool_choice is not built; there are no tools to choose from")
    if isinstance(request, ChatRequest):
        if says(request.audio):
            raise invalid("audio", "audio is not built")
        if request.modalities is not None and request.modalities != ["text"]:
            raise invalid("modalities", "only text is built")


def options(request: Common, default_max_tokens: int | None) -> Options:
    """The native options of a request. Raises EngineError naming the field."""
    _refuse_unbuilt(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    made: Options = {
        "max_tokens": default_max_tokens if request.max_tokens is None else request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "stop": stop,
        "stop_ids": request.stop_token_ids or [],
        "ignore_eos": request.ignore_eos,
        "min_tokens": request.min_tokens,
        "n": request.n or 1,
        "priority": request.priority,
        "deadline_ms": request.deadline_ms,
        "cache_salt": request.cache_salt,
        "logit_bias": request.logit_bias or {},
    }
    if request.presence_penalty is not None:
        made["presence_penalty"] = request.presence_penalty
    if request.frequency_penalty is not None:
        made["frequency_penalty"] = request.frequency_penalty
    conversation = request.session or request.prompt_cache_key or ""
    if conversation:  # a name of any length as one of the wire's
        made["conversation"] = blake2b(conversation.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    if request.seed is not None:
        made["seed"] = request.seed & (2**63 - 1)
    return made


def chat_options(request: ChatRequest) -> Options:
    """The native options of a chat. Raises EngineError naming the field."""
    made = options(request, None)
    if request.max_completion_tokens is not None:
        made["max_tokens"] = request.max_completion_tokens
    if made["max_tokens"] == 0:
        raise invalid("max_tokens", "max_tokens is 0: nothing could be said")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs")
    if request.logprobs:
        made["logprobs"] = request.top_logprobs or 0
    made["messages"] = [message(index, each) for index, each in enumerate(request.messages)]
    made["split_reasoning"] = request.reasoning_format != "none"
    made["template_args"] = request.chat_template_kwargs or {}
    return made


def message(index: int, turn: ChatMessage) -> Message:
    """One turn as the engine takes it. Raises EngineError naming the part."""
    for name in ("tool_calls", "function_call", "audio"):
        if says(getattr(turn, name)):
            raise invalid(f"messages[{index}].{name}", f"{name} is not built")
    content = turn.content
    if isinstance(content, list):
        for at, part in enumerate(content):
            if part.type != "text":
                raise invalid(f"messages[{index}].content[{at}].type", f"parts of type {part.type!r} are not built")
            if part.text is None:
                raise invalid(f"messages[{index}].content[{at}].text", "a text part without text")
        content = "".join(part.text or "" for part in content)
    if not 1 <= len(turn.role) <= 64:
        raise invalid(f"messages[{index}].role", "a role has 1 to 64 characters")
    return Message(turn.role, content or "")


def completion_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Every prompt of a request. Raises EngineError naming the field."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "the prompt is empty")
    if all(isinstance(each, int) for each in prompt):
        return [prompt]  # type: ignore[list-item]
    if not (all(isinstance(each, str) for each in prompt) or all(isinstance(each, list) for each in prompt)):
        raise invalid("prompt", "a list of prompts holds texts alone, or lists of token ids alone")
    if len(prompt) > PROMPTS_MAX:
        raise invalid("prompt", f"{len(prompt)} prompts; {PROMPTS_MAX} are allowed")
    for index, each in enumerate(prompt):
        if not each:
            raise invalid(f"prompt[{index}]", "the prompt is empty")
    return prompt  # type: ignore[return-value]


def completion_options(request: CompletionRequest) -> Options:
    """The native options of a plain completion. Raises EngineError naming the field."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of", "best_of other than n is not built")
    if request.suffix:
        raise invalid("suffix", "suffix is not built")
    made = options(request, COMPLETION_TOKENS)
    made["echo"] = request.echo
    made["parse_special"] = request.parse_special
    if request.logprobs is not None:
        made["logprobs"] = request.logprobs
    return made


class TokenizeRequest(Struct, frozen=True):
    """POST /tokenize: a prompt or messages."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    chat_template_kwargs: TemplateArgs | None = None


class DetokenizeRequest(Struct, frozen=True):
    """POST /detokenize."""

    model: str
    tokens: TokenIds


# Answers.


def usage(each: Usage | None) -> dict[str, Any]:
    told = each or Usage(0, 0, 0)
    return {
        "prompt_tokens": told.prompt_tokens,
        "completion_tokens": told.completion_tokens,
        "total_tokens": told.prompt_tokens + told.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": told.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": told.reasoning_tokens},
    }


def total(parts: Sequence[Usage]) -> Usage:
    """The usage of several native requests together."""
    return Usage(
        sum(each.prompt_tokens for each in parts),
        sum(each.completion_tokens for each in parts),
        sum(each.cached_tokens for each in parts),
        sum(each.reasoning_tokens for each in parts),
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _name(entry: TokenLogprob | TopLogprob) -> str:
    """A token as a key, so that no two are the same: its text, `bytes:\\xe2\\x80` for what is no text alone, and
    `token_id:0` for what adds none, as control tokens."""
    try:
        return entry.bytes.decode() or f"token_id:{entry.id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{each:02x}" for each in entry.bytes)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The chat shape: one entry per token, with its bytes."""
    return {
        "content": [
            {
                "token": _text(entry.bytes),
                "logprob": entry.logprob,
                "bytes": list(entry.bytes),
                "top_logprobs": [
                    {"token": _text(each.bytes), "logprob": each.logprob, "bytes": list(each.bytes)}
                    for each in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def plain_logprobs(entries: Sequence[TokenLogprob], num_top: int, offset: int = 0) -> dict[str, Any]:
    """The older shape: columns. A token is always among its own alternatives; `offset` is where its text begins."""
    tokens = [_name(entry) for entry in entries]
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(_text(entry.bytes))
    tops: list[dict[str, float] | None] = []
    for entry, token in zip(entries, tokens, strict=True):
        if entry.logprob is None:
            tops.append(None)
            continue
        known = {_name(each): each.logprob for each in reversed(entry.top)}
        tops.append({**known, token: entry.logprob})
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def chat_choice(index: int, choice: Choice, asked: ChatRequest) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning and asked.include_reasoning is not False:
        told["reasoning_content"] = choice.reasoning
    return {
        "index": index,
        "message": told,
        "logprobs": chat_logprobs(choice.logprobs) if asked.logprobs else None,
        "finish_reason": choice.reason,
        **token_ids(choice.ids, asked),
    }


def token_ids(ids: list[int], asked: Common) -> dict[str, Any]:
    """The output's token ids, where they were asked for."""
    return {"token_ids": ids} if asked.return_token_ids else {}


def plain_choice(index: int, choice: Choice, answer: Completion, asked: CompletionRequest) -> dict[str, Any]:
    """One choice, after the prompt where it was asked for."""
    text, entries = choice.text, choice.logprobs
    if answer.prompt is not None:
        text, entries = answer.prompt.text + text, [*answer.prompt.logprobs, *entries]
    return {
        "index": index,
        "text": text,
        "logprobs": plain_logprobs(entries, asked.logprobs) if asked.logprobs is not None else None,
        "finish_reason": choice.reason,
        **token_ids(choice.ids, asked),
    }
