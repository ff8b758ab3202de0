"""litellm: completion and acompletion of its `openai/` provider, streams, plain completions, its own exceptions."""

import asyncio
from importlib.metadata import version
from typing import Any

import litellm
from shared import arguments, equal, expect, fail, report

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def chats(common: dict[str, Any]) -> str:
    """Whole and streamed: one text, and the same usage."""
    whole = litellm.completion(messages=MESSAGES, **common)
    text = whole.choices[0].message.content
    equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens, "total_tokens")
    expect(whole.usage.completion_tokens > 0, "usage", whole.usage)
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **common))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    equal(streamed, text, "streamed text")
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None) is not None]
    equal(len(usages), 1, "chunks with usage")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        equal(getattr(usages[0], name), getattr(whole.usage, name), f"streamed {name}")
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    equal(reasons, [whole.choices[0].finish_reason], "finish_reason")
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    equal(rebuilt.choices[0].message.content, text, "text rebuilt of its chunks")
    likely = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=2, **common)
    equal(len(likely.choices[0].logprobs.content), whole.usage.completion_tokens, "logprobs")
    return str(text)


async def awaits(common: dict[str, Any], text: str) -> None:
    """The async ways."""
    answers = await asyncio.gather(*(litellm.acompletion(messages=MESSAGES, **common) for _ in range(4)))
    equal({answer.choices[0].message.content for answer in answers}, {text}, "awaited texts")
    stream = await litellm.acompletion(messages=MESSAGES, stream=True, **common)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    equal("".join(parts), text, "text of an async stream")


def completes(common: dict[str, Any]) -> str:
    """Plain completions by their own provider name."""
    asked = {**common, "model": common["model"].replace("openai/", "text-completion-openai/")}
    whole = litellm.text_completion(prompt="ab 12", **asked)
    stream = litellm.text_completion(prompt="ab 12", stream=True, **asked)
    text = "".join(chunk.choices[0].text or "" for chunk in stream if chunk.choices)
    equal(text, whole.choices[0].text, "streamed completion")
    return text


def errors(common: dict[str, Any]) -> list[str]:
    """The exceptions that its callers choose fallbacks by."""
    told = []
    long = [{"role": "user", "content": "x" * 5000}]
    cases: list[tuple[type[Exception], dict[str, Any]]] = [
        (litellm.NotFoundError, {"model": "openai/nope", "messages": MESSAGES}),
        (litellm.ContextWindowExceededError, {"messages": long}),
        (litellm.BadRequestError, {"messages": MESSAGES, "temperature": -1}),
    ]
    for kind, fields in cases:
        try:
            litellm.completion(**{**common, **fields})
        except kind as error:
            told.append(type(error).__name__)
        else:
            fail(f"no {kind.__name__}")
    return told


def main() -> None:
    """All of it."""
    told = arguments()
    common: dict[str, Any] = {
        "model": f"openai/{told.model}",
        "api_base": f"{told.url}/v1",
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
        "num_retries": 0,
        "max_retries": 0,
    }
    text = chats(common)
    asyncio.run(awaits(common, text))
    report(version=version("litellm"), text=text, completed=completes(common), errors=errors(common))


main()
