"""langchain-openai: ChatOpenAI invoked, streamed, batched, async; OpenAI for completions; usage in each."""

import asyncio
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from shared import arguments, equal, expect, fail, report

MESSAGES = [SystemMessage("be brief"), HumanMessage("hi")]


def chats(chat: ChatOpenAI) -> str:
    """Whole, streamed and in a batch: one text, and the same usage."""
    whole = chat.invoke(MESSAGES)
    usage: Any = whole.usage_metadata
    expect(usage is not None and usage["output_tokens"] > 0, "usage_metadata", usage)
    equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"], "total_tokens")
    expect(whole.response_metadata["finish_reason"] in {"stop", "length"}, "metadata", whole.response_metadata)
    joined: Any = None
    num_parts = 0
    for part in chat.stream(MESSAGES):
        expect(isinstance(part, AIMessageChunk), "a part of a stream", part)
        joined = part if joined is None else joined + part
        num_parts += 1
    expect(num_parts > 2, "the stream came at once", num_parts)
    equal(joined.content, whole.content, "streamed content")
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        equal(joined.usage_metadata[name], usage[name], f"streamed {name}")
    several = chat.batch([MESSAGES, "hi", MESSAGES])
    equal([several[0].content, several[2].content], [whole.content] * 2, "content in a batch")
    expect(several[1].usage_metadata["output_tokens"] > 0, "usage in a batch", several[1].usage_metadata)
    chain = ChatPromptTemplate.from_messages([("system", "be brief"), ("user", "{said}")]) | chat
    equal(chain.invoke({"said": "hi"}).content, whole.content, "content of a chain")
    likely = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    equal(len(likely.response_metadata["logprobs"]["content"]), usage["output_tokens"], "logprobs")
    return str(whole.content)


async def awaits(chat: ChatOpenAI, text: str) -> None:
    """The async ways."""
    answers = await asyncio.gather(*(chat.ainvoke(MESSAGES) for _ in range(4)))
    equal({answer.content for answer in answers}, {text}, "awaited contents")
    equal("".join([str(part.content) async for part in chat.astream(MESSAGES)]), text, "content of an async stream")
    kinds = [event["event"] async for event in chat.astream_events(MESSAGES, version="v2")]
    equal((kinds[0], kinds[-1]), ("on_chat_model_start", "on_chat_model_end"), "events")


def completes(plain: OpenAI) -> int:
    """The older class: invoked, streamed, several prompts in one request with their usage."""
    text = plain.invoke("ab 12")
    equal("".join(plain.stream("ab 12")), text, "streamed completion")
    told = plain.generate(["ab 12", "x"])
    equal(told.generations[0][0].text, text, "a completion among several")
    usage = told.llm_output["token_usage"]
    equal(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")
    return int(usage["total_tokens"])


def main() -> None:
    """All of it."""
    told = arguments()
    common: dict[str, Any] = {"base_url": f"{told.url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(model=told.model, max_tokens=12, stream_usage=True, **common)
    text = chats(chat)
    asyncio.run(awaits(chat, text))
    num_tokens = completes(OpenAI(model=told.model, max_tokens=6, **common))
    try:
        ChatOpenAI(model="nope", **common).invoke("hi")
    except openai.NotFoundError as error:
        equal(error.code, "model_not_found", "error of a model that is none")
    else:
        fail("a model that is none answered")
    try:
        chat.invoke("x" * 5000)
    except ContextOverflowError as error:
        expect("5018 tokens" in str(error), "what a prompt that is too long is told", error)
    else:
        fail("a prompt that is too long was answered")
    report(version=version("langchain-openai"), text=text, num_tokens=num_tokens)


main()
