"""What requests mean to the engine, and what answers look like, without a socket."""

from typing import Any

import msgspec
import pytest

from engine.gateway import openai
from engine.gateway.reply import error_body, explained, sse, status_of
from engine.gateway.shapes import ChatShape, PlainShape
from ipc.errors import HTTP_STATUS, Code, EngineError
from ipc.messages import Delta, Echo, Ended, Event, Finished, TokenLogprob, TopLogprob, Usage
from ipc.streams import Choice, Completion, Prompt

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> openai.ChatRequest:
    return msgspec.convert({"model": "m", "messages": USER, **fields}, openai.ChatRequest)


def plain(**fields: Any) -> openai.CompletionRequest:
    return msgspec.convert({"model": "m", "prompt": "hi", **fields}, openai.CompletionRequest)


def test_what_is_not_said_is_left_to_the_model():
    made = openai.chat_options(chat())
    assert [made[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")] == [None] * 5
    assert made["max_tokens"] is None
    assert openai.completion_options(plain())["max_tokens"] == openai.COMPLETION_TOKENS
    assert openai.chat_options(chat(max_tokens=9, max_completion_tokens=5))["max_tokens"] == 5
    assert openai.chat_options(chat(temperature=0, seed=-1))["temperature"] == 0
    assert openai.chat_options(chat(seed=-1))["seed"] == 2**63 - 1
    assert openai.chat_options(chat(stop="x"))["stop"] == ["x"]


def test_reasoning_can_be_left_in_the_text():
    assert openai.chat_options(chat())["split_reasoning"]
    assert not openai.chat_options(chat(reasoning_format="none"))["split_reasoning"]
    assert openai.chat_options(chat(chat_template_kwargs={"enable_thinking": False}))["template_args"] == {
        "enable_thinking": False
    }
    choice = Choice("said", [], "stop", reasoning="thought")
    assert openai.chat_choice(0, choice, chat())["message"]["reasoning_content"] == "thought"
    assert "reasoning_content" not in openai.chat_choice(0, choice, chat(include_reasoning=False))["message"]
    assert "reasoning_content" not in openai.chat_choice(0, Choice("x", [], "stop"), chat())["message"]


def test_prompts_of_every_form():
    assert openai.completion_prompts(plain(prompt="a")) == ["a"]
    assert openai.completion_prompts(plain(prompt=["a", "b"])) == ["a", "b"]
    assert openai.completion_prompts(plain(prompt=[1, 2])) == [[1, 2]]
    assert openai.completion_prompts(plain(prompt=[[1], [2]])) == [[1], [2]]


@pytest.mark.parametrize(
    ("code", "field", "expected"),
    [
        (Code.TOO_LARGE, "prompt", (400, "context_length_exceeded", "prompt")),
        (Code.TOO_LARGE, "body", (413, "too_large", "body")),
        (Code.NOT_FOUND, "route", (404, "model_not_found", "model")),
        (Code.INVALID, "", (400, "invalid", None)),
        (Code.OVERLOADED, "", (HTTP_STATUS[Code.OVERLOADED], "overloaded", None)),
    ],
)
def test_errors_as_their_clients_know_them(code: Code, field: str, expected: tuple[int, str, str | None]):
    error = EngineError(code, "told", field)
    body = error_body(error, status_of(error))["error"]
    assert (status_of(error), body["code"], body["param"]) == expected
    assert body["message"] == "told"


def test_a_wrong_field_is_named_by_its_path():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"model": "m", "messages": [{"role": 1}]}', type=openai.ChatRequest)
    assert explained(caught.value).field == "messages[0].role"
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"model": "m"}', type=openai.ChatRequest)
    assert explained(caught.value).field == "messages"
    assert explained(RecursionError()).code is Code.INVALID


def events_of(data: bytes) -> list[Any]:
    return [
        msgspec.json.decode(part.removeprefix(b"data: "))
        for part in data.split(b"\n\n")
        if part[-6:] != b"[DONE]" and part
    ]


def run(shape: ChatShape | PlainShape, *events: Event) -> list[Any]:
    data = shape.start() + b"".join(shape.events(0, event) for event in events) + shape.finish()
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b"[DONE]") == 1
    return events_of(data)


END = Finished("r", 2, "c", [3], "stop", Usage(4, 3, 1))


def test_a_chat_stream():
    shape = ChatShape("id", 7, chat(stream_options={"include_usage": True}))
    told = run(shape, Delta("r", 0, "", [1], prompt_tokens=4, reasoning="hm"), Delta("r", 1, "a", [2]), END)
    deltas = [chunk["choices"][0]["delta"] for chunk in told[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "a"},
        {"content": "c"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told[:-1]] == [None] * 4 + ["stop"]
    assert [chunk["usage"] for chunk in told[:-1]] == [None] * 5
    assert (told[-1]["choices"], told[-1]["usage"]["total_tokens"]) == ([], 7)
    assert shape.num_tokens == 3
    assert all(chunk["id"] == "id" and chunk["created"] == 7 and chunk["model"] == "m" for chunk in told)


def test_text_that_is_not_certain_yet_makes_no_chunk():
    told = run(ChatShape("id", 7, chat()), Delta("r", 0, "", [1]), END)
    assert [chunk["choices"][0]["delta"] for chunk in told[1:-1]] == [{"content": "c"}]
    assert all("usage" not in chunk for chunk in told)


def test_usage_with_every_chunk_where_asked():
    asked = chat(stream_options={"include_usage": True, "continuous_usage_stats": True})
    told = run(ChatShape("id", 7, asked), Delta("r", 0, "a", [1], prompt_tokens=4), END)
    assert [chunk["usage"]["total_tokens"] for chunk in told] == [0, 5, 6, 6, 7]


def test_the_choices_of_several_answers():
    shape = PlainShape("id", 7, plain(n=2))
    told = run(
        shape,
        Delta("r", 0, "a", [1]),
        Delta("r", 0, "b", [2], choice=1),
        Ended("r", 1, "", [], 1, "stop"),
        Ended("r", 1, "c", [3], 0, "length"),
        Finished("r", 2, "", [], "length", Usage(1, 3)),
    )
    said = [(each["index"], each["text"], each["finish_reason"]) for chunk in told for each in chunk["choices"]]
    assert said == [(0, "a", None), (1, "b", None), (1, "", "stop"), (0, "c", None), (0, "", "length")]


def test_columns_of_log_probabilities():
    entries = [
        TokenLogprob(1, b"a", None),
        TokenLogprob(2, "é".encode(), -0.5, [TopLogprob(3, b"x", -0.1), TopLogprob(2, "é".encode(), -0.5)]),
        TokenLogprob(4, b"\xff", -9.0, [TopLogprob(3, b"x", -0.1)]),
        TokenLogprob(7, b"", -1.0, [TopLogprob(0, b"", -0.5)]),
    ]
    told = openai.plain_logprobs(entries, 2, 10)
    assert told == {
        "tokens": ["a", "é", "bytes:\\xff", "token_id:7"],
        "token_logprobs": [None, -0.5, -9.0, -1.0],
        "top_logprobs": [
            None,
            {"x": -0.1, "é": -0.5},
            {"x": -0.1, "bytes:\\xff": -9.0},
            {"token_id:0": -0.5, "token_id:7": -1.0},
        ],
        "text_offset": [10, 11, 12, 13],
    }
    assert openai.plain_logprobs(entries, 0)["top_logprobs"] is None
    first = openai.chat_logprobs(entries[1:])["content"][0]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == ("é", [195, 169], "x")


def test_token_ids_where_they_are_asked_for():
    events = Delta("r", 0, "", [1], prompt_tokens=4), Delta("r", 1, "a", [2]), END
    for shape in (ChatShape("id", 7, chat(return_token_ids=True)), PlainShape("id", 7, plain(return_token_ids=True))):
        ids = [chunk["choices"][0].get("token_ids", []) for chunk in run(shape, *events)]
        assert [each for each in ids if each] == [[1], [2], [3]]
    choice = Choice("a", [1, 2], "stop")
    assert openai.chat_choice(0, choice, chat(return_token_ids=True))["token_ids"] == [1, 2]
    assert "token_ids" not in openai.chat_choice(0, choice, chat())


def test_the_prompt_comes_before_its_answer():
    answer = Completion("r", "b", [2], "stop", Usage(1, 1), prompt=Prompt("a", [1], [TokenLogprob(1, b"a", None)]))
    told = openai.plain_choice(
        0, Choice("b", [2], "stop", logprobs=[TokenLogprob(2, b"b", -1.0)]), answer, plain(logprobs=1)
    )
    assert (told["text"], told["logprobs"]["token_logprobs"]) == ("ab", [None, -1.0])
    streamed = run(PlainShape("id", 7, plain(echo=True)), Echo("r", 0, "a", [1]), END)
    assert [chunk["choices"][0]["text"] for chunk in streamed] == ["a", "c", ""]


def test_a_fault_after_the_beginning():
    shape = ChatShape("id", 7, chat())
    (told,) = events_of(shape.fail(EngineError(Code.WORKER_LOST, "gone")))
    assert told["error"]["code"] == "worker_lost"
    assert sse({"a": 1}, "name") == b'event: name\ndata: {"a":1}\n\n'
