"""The response object and the events that lead to it."""

from typing import Any

import msgspec
import pytest

from engine.gateway import responses
from ipc.errors import Code, EngineError
from ipc.messages import Cancelled, Delta, Event, Failed, Finished, Message, TokenLogprob, Usage
from ipc.streams import Stored

NAME = "resp_1"
END = Finished("r", 2, "c", [3], "stop", Usage(4, 3, 1, 1))


def ask(**fields: Any) -> responses.ResponsesRequest:
    body = msgspec.json.encode({"model": "m", "input": "hi", **fields})
    return msgspec.json.decode(body, type=responses.ResponsesRequest)


def begun(**fields: Any) -> dict[str, Any]:
    return responses.begin(ask(**fields), NAME, 7)


def stored(state: str, *events: Event, **fields: Any) -> Stored:
    note = msgspec.json.encode(responses.Note(begun(**fields), [Message("user", "hi")]))
    return Stored(NAME, state, 1.0, note, list(events))


def run(*events: Event) -> list[tuple[str, dict[str, Any]]]:
    shape = responses.ResponseShape(begun())
    data = shape.start() + b"".join(shape.events(0, event) for event in events) + shape.finish()
    told = []
    for part in data.decode().split("\n\n")[:-1]:
        name, _, body = part.partition("\n")
        told.append((name.removeprefix("event: "), msgspec.json.decode(body.removeprefix("data: "))))
    assert [event["sequence_number"] for _, event in told] == list(range(len(told)))
    assert [event["type"] for _, event in told] == [name for name, _ in told]
    return told


def test_the_turns_of_every_input():
    assert responses.messages(ask()) == [Message("user", "hi")]
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    assert [(turn.role, turn.content) for turn in responses.messages(ask(input=items))] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "cd"),
    ]
    made = responses.options(ask(instructions="brief", max_output_tokens=5), [Message("user", "hi")])
    assert made["messages"] == [Message("system", "brief"), Message("user", "hi")]
    assert made["max_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "background"),
    ],
)
def test_what_is_wrong_or_not_built_is_named(fields: dict[str, Any], field: str):
    asked = ask(**fields)
    with pytest.raises(EngineError) as caught:
        responses.options(asked, responses.messages(asked))
    assert caught.value.field == field


def test_the_order_of_events():
    told = run(Delta("r", 0, "a", [1], prompt_tokens=4), Delta("r", 1, "b", [2]), END)
    assert [name.removeprefix("response.") for name, _ in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    last = told[-1][1]["response"]
    assert last["output"][0]["content"][0]["text"] == "abc" == told[-4][1]["text"]
    assert last["usage"]["total_tokens"] == 7
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


def test_thoughts_are_an_item_of_their_own():
    told = run(Delta("r", 0, "", [1], reasoning="h"), Delta("r", 1, "", [2], reasoning="m"), END)
    assert [name.removeprefix("response.") for name, _ in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    output = told[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["content"][0]["text"] == "hm"
    assert told[7][1]["output_index"] == 1


def test_an_answer_without_text_still_has_its_message():
    told = run(Finished("r", 0, "", [9], "stop", Usage(4, 1)))
    assert told[-1][1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_what_is_kept_equals_what_was_streamed(reason: str):
    scored = [TokenLogprob(1, b"a", -0.5)]
    events = [Delta("r", 0, "a", [1], logprobs=scored, reasoning="t"), Finished("r", 1, "b", [2], reason, Usage(4, 2))]
    assert responses.of_stored(stored("finished", *events)) == run(*events)[-1][1]["response"]
    assert responses.of_stored(stored("finished", *events))["status"] == {"stop": "completed"}.get(reason, "incomplete")


def test_the_states_of_what_is_kept():
    assert responses.of_stored(stored("queued"))["status"] == "queued"
    assert responses.of_stored(stored("running", Delta("r", 0, "a", [1])))["status"] == "in_progress"
    assert responses.of_stored(stored("cancelled", Cancelled("r", 1)))["status"] == "cancelled"
    failed = responses.of_stored(stored("failed", Failed("r", "worker_lost", "gone")))
    assert (failed["status"], failed["error"]) == ("failed", {"code": "worker_lost", "message": "gone"})


def test_a_conversation_goes_on():
    assert responses.conversation(stored("finished", END)) == [Message("user", "hi"), Message("assistant", "c")]
    for kept in (stored("running"), stored("cancelled", Cancelled("r"))):
        with pytest.raises(EngineError) as caught:
            responses.conversation(kept)
        assert caught.value.field == "previous_response_id"
    assert responses.input_items(stored("finished", END))["data"][0]["content"][0]["text"] == "hi"
    with pytest.raises(EngineError) as caught:
        responses.of_stored(Stored("x", "finished", 1.0, b"not a note", []))
    assert caught.value.code is Code.NOT_FOUND
