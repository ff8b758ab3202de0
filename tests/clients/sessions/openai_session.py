"""The openai package: whole and streamed, sync and async, logprobs, models, errors that no retry mends, responses."""

import asyncio
import math
from typing import Any

import openai
from shared import arguments, equal, expect, fail, report

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
USAGE: Any = {"include_usage": True}


def chats(client: openai.OpenAI, model: str) -> str:
    """A chat whole, then streamed: the same text and the same counts."""
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    choice = whole.choices[0]
    equal(whole.object, "chat.completion", "object")
    equal(choice.message.role, "assistant", "role")
    expect(choice.finish_reason in {"stop", "length"}, "finish_reason", choice.finish_reason)
    usage = whole.usage
    expect(usage is not None and usage.prompt_tokens > 0 and usage.completion_tokens > 0, "usage", usage)
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=12, temperature=0, stream=True, stream_options=USAGE
        )
    )
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]), choice.message.content, "text")
    equal([chunk.usage for chunk in chunks[:-1]], [None] * (len(chunks) - 1), "usage before the last chunk")
    equal(chunks[-1].choices, [], "choices of the last chunk")
    equal(chunks[-1].usage.completion_tokens, usage.completion_tokens, "streamed completion_tokens")
    equal(chunks[-1].usage.prompt_tokens, usage.prompt_tokens, "streamed prompt_tokens")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    equal(reasons, [None] * (len(reasons) - 1) + [choice.finish_reason], "finish_reason of every chunk")
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=12, temperature=0) as helper:
        final = [event for event in helper if event.type == "content.done"]
    equal([event.content for event in final], [choice.message.content], "content of the stream helper")
    return str(choice.message.content)


def completes(client: openai.OpenAI, model: str, sim: str) -> None:
    """Plain completions: several prompts, several choices, echo, a stream of both routes."""
    whole = client.completions.create(model=model, prompt=["ab", "x"], max_tokens=6, temperature=0, n=2)
    equal([choice.index for choice in whole.choices], [0, 1, 2, 3], "indexes")
    equal(whole.choices[0].text, whole.choices[1].text, "two greedy choices")
    parts: dict[int, str] = {}
    stream = client.completions.create(
        model=model, prompt=["ab", "x"], max_tokens=6, temperature=0, stream=True, stream_options=USAGE
    )
    last = None
    for last in stream:
        for choice in last.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    equal([parts[0], parts[1]], [whole.choices[0].text, whole.choices[2].text], "streamed texts")
    expect(last is not None and last.usage is not None, "the stream told no usage", last)
    echoed = client.completions.create(model=model, prompt="ab", max_tokens=6, temperature=0, echo=True)
    equal(echoed.choices[0].text, "ab" + whole.choices[0].text, "echoed text")
    body = {"ignore_eos": True}
    fake = client.completions.create(model=sim, prompt="x", max_tokens=40, seed=7, extra_body=body)
    equal(fake.usage.completion_tokens, 40, "tokens of the fake model")
    stream = client.completions.create(model=sim, prompt="x", max_tokens=40, seed=7, stream=True, extra_body=body)
    equal("".join(each.choices[0].text for each in stream), fake.choices[0].text, "the fake model's stream")


def logprobs(client: openai.OpenAI, model: str) -> None:
    """Of chat and of completions: as many as there are tokens, sorted, no more likely than certain."""
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=4
    )
    content = chat.choices[0].logprobs.content
    equal(len(content), chat.usage.completion_tokens, "entries of the chat's logprobs")
    for entry in content:
        values = [each.logprob for each in entry.top_logprobs]
        equal(len(values), 4, "top_logprobs")
        equal(values, sorted(values, reverse=True), "order of top_logprobs")
        expect(entry.logprob <= 0 and math.isclose(entry.logprob, values[0], abs_tol=1e-6), "greedy", entry)
    if chat.choices[0].finish_reason == "length":
        joined = b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")
        equal(joined, chat.choices[0].message.content, "the text of all bytes")
    chunks = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=4, stream=True
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    equal([each.token for each in streamed], [each.token for each in content], "streamed tokens")
    plain = client.completions.create(model=model, prompt="ab 12", max_tokens=8, temperature=0, logprobs=3, echo=True)
    told = plain.choices[0].logprobs
    num_tokens = plain.usage.total_tokens
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        equal(len(getattr(told, name)), num_tokens, name)
    equal(told.token_logprobs[0], None, "the first token's logprob")
    expect(all(value <= 0 for value in told.token_logprobs[1:]), "a logprob above 0", told.token_logprobs)


async def at_once(url: str, model: str) -> int:
    """The async client: sixteen chats together, half of them streams, all with the same answer."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def whole() -> str:
            told = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
            return str(told.choices[0].message.content)

        async def streamed() -> str:
            stream = await client.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(way() for _ in range(8) for way in (whole, streamed)))
        equal(len(set(texts)), 1, "different greedy answers to one chat")
        equal([each.id async for each in client.models.list()][:2], ["sim", "tiny"], "models of the async client")
        return len(texts)


def errors(client: openai.OpenAI, model: str) -> list[str]:
    """What is wrong with a request is an exception of its class, with the field's name, and is not tried again."""
    told = []
    cases: list[tuple[type[openai.APIStatusError], str | None, str, dict[str, Any]]] = [
        (openai.NotFoundError, "model_not_found", "model", {"model": "nope", "prompt": "x"}),
        (openai.BadRequestError, "context_length_exceeded", "prompt", {"model": model, "prompt": "x" * 5000}),
        (openai.BadRequestError, "invalid", "temperature", {"model": model, "prompt": "x", "temperature": -1}),
        (openai.BadRequestError, "invalid", "n", {"model": model, "prompt": "x", "n": 1000}),
        (openai.BadRequestError, "invalid", "stream_options.include_usage", {
            "model": model, "prompt": "x", "stream": True, "stream_options": {"include_usage": 1}
        }),
    ]  # fmt: skip
    for kind, code, param, fields in cases:
        try:
            client.completions.create(**fields)
        except kind as error:
            equal((error.code, error.param), (code, param), f"error of {param}")
            expect(error.request_id, "the error has no request id")
            equal(error.response.headers.get("x-should-retry"), "false", "x-should-retry")
            told.append(f"{type(error).__name__} {error.code}")
        else:
            fail(f"nothing is raised for a wrong {param}")
    return told


def models(client: openai.OpenAI, model: str) -> None:
    """All models, one, and one that is none."""
    names = [each.id for each in client.models.list()]
    expect(model in names, "the model is not listed", names)
    one = client.models.retrieve(model)
    equal((one.id, one.object), (model, "model"), "a model")
    try:
        client.models.retrieve("nope")
    except openai.NotFoundError as error:
        equal(error.code, "model_not_found", "error of a model that is none")
    else:
        fail("a model that is none was found")


ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def responses_session(client: openai.OpenAI, model: str) -> str:
    """Responses: create, stream, retrieve, cancel, delete."""
    asked: dict[str, Any] = {"model": model, "input": "hi", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    equal(whole.object, "response", "object of a response")
    expect(whole.status in {"completed", "incomplete"}, "status of a response", whole.status)
    expect(whole.usage is not None and whole.usage.output_tokens > 0, "usage of a response", whole.usage)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    last = "response.completed" if whole.status == "completed" else "response.incomplete"
    wanted = [*ORDER[:-1], last]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    equal(once, wanted, "order of a response's events")
    equal([event.sequence_number for event in events], list(range(len(events))), "sequence numbers")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    equal(text, whole.output_text, "streamed text of a response")
    equal(events[-1].response.output_text, whole.output_text, "text of the last event")
    again = client.responses.retrieve(whole.id)
    equal((again.id, again.output_text), (whole.id, whole.output_text), "a response retrieved")
    long = {**asked, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    begun = client.responses.create(**long, background=True)
    expect(begun.status in {"queued", "in_progress"}, "status of a response in the background", begun.status)
    equal(client.responses.cancel(begun.id).status, "cancelled", "status of a response that was cancelled")
    equal(client.responses.retrieve(begun.id).status, "cancelled", "status of a response after its cancel")
    client.responses.delete(whole.id)
    for name in (whole.id, "resp_nope"):
        try:
            client.responses.retrieve(name)
        except openai.NotFoundError:
            continue
        fail(f"{name}, which is kept no more, was found")
    return "served"


def main() -> None:
    """All of it, one after the other."""
    told = arguments("sim")
    with openai.OpenAI(base_url=f"{told.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        text = chats(client, told.model)
        completes(client, told.model, told.sim)
        logprobs(client, told.model)
        models(client, told.model)
        raised = errors(client, told.model)
        responses = responses_session(client, told.model)
    num_at_once = asyncio.run(at_once(told.url, told.model))
    report(version=openai.VERSION, text=text, errors=raised, responses=responses, at_once=num_at_once)


main()
