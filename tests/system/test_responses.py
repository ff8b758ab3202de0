"""Responses, thoughts, aliases and defaults through real processes, by the openai package and by hand."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ipc.client import AsyncClient, client_address
from ipc.errors import Code, EngineError
from ipc.messages import Delta, Message
from tests.models_tiny import TURNS, write, write_folder
from tests.system.harness import EngineProcess, engine, llm_toml, until
from tests.system.http_calls import DOOR, get, post, raw_post, send
from tests.system.http_calls import address as address_of

LONG = {"max_output_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """tiny: a decoder. thinker: one whose template opens a thought, and whose files want the likeliest token."""
    directory = tmp_path_factory.mktemp("models")
    thinker = write_folder(directory / "thinker")
    template = TURNS + "{{ '<|start|>assistant\n' }}{% if think is not defined or think %}{{ '<think>\n' }}{% endif %}"
    told = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": template}
    (thinker / "tokenizer_config.json").write_text(json.dumps(told))
    (thinker / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "do_sample": False}))
    toml = "[front]\nkept_max = 24\n"
    toml += llm_toml("tiny", write(directory / "tiny.gguf"), more='aliases = ["small"]')
    toml += llm_toml("thinker", thinker)
    with engine(toml, **DOOR) as made:
        made.wait_ready(120.0)
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


@pytest.fixture
def api(running: EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def respond(running: EngineProcess, **fields: object) -> tuple[int, Any, dict[str, str]]:
    return post(running, "/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 3, **fields})


def test_the_openai_client_creates_streams_retrieves_and_deletes(api: openai.OpenAI):
    fields: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 8, "temperature": 0}
    whole = api.responses.create(**fields, instructions="be brief", metadata={"a": "b"})
    assert whole.status in {"completed", "incomplete"}
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    again = api.responses.retrieve(whole.id)
    assert again == whole
    assert again.output_text == whole.output_text
    events = list(api.responses.create(**fields, stream=True))
    assert events[0].type == "response.created"
    last: Any = events[-1]
    assert last.type in {"response.completed", "response.incomplete"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        last.response.output_text
    )
    assert api.responses.retrieve(last.response.id).output_text == last.response.output_text
    (item,) = api.responses.input_items.list(whole.id).data
    assert item.content[0].text == "hi"
    api.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(whole.id)


def test_a_background_response_is_polled_or_cancelled_by_anybody_of_its_tenant(
    running: EngineProcess, api: openai.OpenAI
):
    for _ in range(10):
        begun = api.responses.create(model="tiny", input="hi", background=True, extra_body=LONG)
        assert begun.status in {"queued", "in_progress"}
        cancelled = api.responses.cancel(begun.id)
        assert api.responses.retrieve(begun.id) == cancelled
        if cancelled.status == "cancelled":
            break
        assert cancelled.status == "incomplete"  # it was faster than we: again
    assert cancelled.status == "cancelled"
    until(lambda: all(each.num_running == 0 for each in running.replicas()), 10.0, "it stopped")
    second = api.responses.create(model="tiny", input="hi", background=True, max_output_tokens=4)
    done = until(lambda: (told := api.responses.retrieve(second.id)).status in {"completed", "incomplete"} and told)
    assert done.usage.output_tokens <= 4
    assert api.responses.cancel(second.id).status == done.status  # too late: it stays as it is


def test_a_background_stream_outlives_its_reader(running: EngineProcess, api: openai.OpenAI):
    stream = api.responses.create(model="tiny", input="hi", background=True, stream=True, extra_body=LONG)
    first: Any = next(iter(stream))
    stream.close()
    done = until(lambda: (told := api.responses.retrieve(first.response.id)).status == "incomplete" and told)
    assert done.usage.output_tokens == 150


def test_a_reader_that_leaves_ends_a_response_that_is_not_in_the_background(running: EngineProcess):
    import socket

    with socket.create_connection(address_of(running), 10) as connection:
        connection.sendall(raw_post("/v1/responses", {"model": "tiny", "input": "hi", "stream": True, **LONG}))
        seen = b""
        while b"output_text.delta" not in seen:
            seen += connection.recv(4096)
    name = json.loads(seen.partition(b"data: ")[2].partition(b"\n")[0])["response"]["id"]
    until(lambda: get(running, f"/v1/responses/{name}")[1]["status"] == "cancelled")


def test_a_conversation_goes_on_from_a_response(running: EngineProcess):
    _, first, _ = respond(running, input="ab")
    text = first["output"][0]["content"][0]["text"]
    _, second, _ = respond(running, input="c", previous_response_id=first["id"], temperature=0)
    turns = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "c"},
    ]
    _, whole, _ = respond(running, input=turns, temperature=0)
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    third = respond(running, input="d", previous_response_id=second["id"])[1]
    assert len(get(running, f"/v1/responses/{third['id']}/input_items")[1]["data"]) == 5


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": ""}, 200, None),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "User", "content": "x"}]}, 400, "input[0].role"),
        ({"input": "x" * 300}, 400, "input"),
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"previous_response_id": ""}, 200, None),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"background": True, "store": False}, 400, "background"),
        ({"background": True, "input": [{"role": "User", "content": "x"}]}, 200, None),  # told when it is fetched
        ({"background": True, "model": "none"}, 404, "model"),
        ({"stream": True, "input": "x" * 300}, 400, "input"),
    ],
)
def test_what_is_wrong_with_a_response_is_named(running: EngineProcess, fields: dict, status: int, param: str | None):
    got, body, _ = respond(running, **fields)
    assert got == status, body
    if param is not None:
        assert body["error"]["param"] == param
    elif body["background"]:
        told = until(lambda: (told := get(running, f"/v1/responses/{body['id']}")[1])["status"] == "failed" and told)
        assert "role" in told["error"]["message"]


def test_what_is_not_stored_is_not_found(running: EngineProcess):
    _, told, _ = respond(running, store=False)
    for path in (told["id"], "resp_none", "x" * 65, "%20", "a/b"):
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            status, body, _ = send(running, method, f"/v1/responses/{path}{tail}")
            assert (status, "error" in json.loads(body)) == (404, True), (method, path)


def test_so_many_are_kept_and_the_oldest_go(running: EngineProcess):
    names = [respond(running, max_output_tokens=1)[1]["id"] for _ in range(26)]
    assert [get(running, f"/v1/responses/{name}")[0] for name in names[:2]] == [404, 404]
    assert get(running, f"/v1/responses/{names[-1]}")[0] == 200


# The same by the native client.


def test_requests_are_kept_for_every_session_of_their_tenant(running: EngineProcess):
    with running.client() as one, running.client() as other:
        whole = one.generate("tiny", "ab", max_tokens=5, tenant="t", request="kept-1", keep_s=60, note=b"mine")
        stored = other.fetch("kept-1", "t")
        assert stored.completion() == whole
        assert (stored.state, stored.note) == ("finished", b"mine")
        with pytest.raises(EngineError) as caught:
            other.fetch("kept-1", "u")
        assert caught.value.code is Code.NOT_FOUND
        assert other.forget("kept-1", "t").completion() == whole
        with pytest.raises(EngineError):
            one.fetch("kept-1", "t")
        # A name that is kept is taken, and free again when it is forgotten.
        one.generate("tiny", "ab", max_tokens=1, request="kept-2", keep_s=60)
        with pytest.raises(EngineError) as caught:
            other.generate("tiny", "ab", max_tokens=1, request="kept-2", keep_s=60)
        assert caught.value.code is Code.DUPLICATE


def test_a_detached_request_outlives_its_session_and_another_ends_it(running: EngineProcess):
    with running.client() as other:
        with running.client() as one:
            stream = one.stream(
                "tiny", "ab", max_tokens=190, ignore_eos=True, request="kept-3", keep_s=60, detach=True, tenant="t"
            )
            next(stream)
        stored = until(lambda: len((kept := other.fetch("kept-3", "t")).events) > 20 and kept)
        assert stored.state == "running"
        ids = [id for event in stored.events if isinstance(event, Delta) for id in event.ids]
        assert [event.index for event in stored.events if isinstance(event, Delta)] == list(range(len(ids)))
        other.cancel("kept-3", "t")
        assert other.fetch("kept-3", "t").state in {"cancelled", "finished"}
        until(lambda: all(each.num_running == 0 for each in running.replicas()))


def test_who_leaves_a_detached_request_holds_nothing_of_it(running: EngineProcess):
    """Its events went on filling the sink of a reader that was gone."""

    async def scenario() -> None:
        async with AsyncClient(client_address(running.run_dir)) as client:
            options = {"max_tokens": 150, "ignore_eos": True, "keep_s": 60.0, "detach": True}
            stream = await client.stream("tiny", "ab", request="kept-4", **options)
            await anext(stream)
            client.leave("kept-4")
            assert client.statistics().num_open == 0
            while not (stored := await client.fetch("kept-4")).is_over:
                await asyncio.sleep(0.02)
            assert len(stored.completion().ids) == 150
            await client.forget("kept-4")

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_is_kept_survives_many_at_once(running: EngineProcess):
    def ask(number: int) -> None:
        with running.client() as client:
            whole = client.generate("tiny", "ab", max_tokens=5, request=f"many-{number}", keep_s=60, seed=number)
            assert client.fetch(f"many-{number}").completion() == whole
            client.forget(f"many-{number}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


# Thoughts.


def chat(running: EngineProcess, **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "thinker", "messages": messages, "max_tokens": 12, "ignore_eos": True, **fields}
    status, told, _ = post(running, "/v1/chat/completions", body)
    assert status == 200, told
    return told


def test_thoughts_are_told_apart_and_the_switch_works(running: EngineProcess):
    """This model never closes its thought, so all of it is one."""
    apart = chat(running)
    message = apart["choices"][0]["message"]
    assert message["content"] == ""
    assert apart["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    together = chat(running, reasoning_format="none")["choices"][0]["message"]
    assert "reasoning_content" not in together
    assert together["content"].strip() == message["reasoning_content"].strip() != ""
    hidden = chat(running, include_reasoning=False)["choices"][0]["message"]
    assert (hidden["content"], "reasoning_content" in hidden) == ("", False)
    off = chat(running, chat_template_kwargs={"think": False})["choices"][0]["message"]
    assert "reasoning_content" not in off
    assert off["content"] != ""


def test_thoughts_stream_as_they_come(running: EngineProcess):
    text = chat(running, stream=True)
    assert isinstance(text, str)
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    thoughts = [chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks]
    whole = chat(running)["choices"][0]["message"]["reasoning_content"]
    assert "".join(thoughts) == whole
    with running.client() as client:
        messages = [Message("user", "hi")]
        native = client.generate("thinker", "", messages=messages, max_tokens=12, ignore_eos=True)
        assert (native.text, native.reasoning) == ("", whole)
        raw = client.generate("thinker", "", messages=messages, max_tokens=12, ignore_eos=True, split_reasoning=False)
        assert raw.text.strip() == whole


def test_a_response_has_its_thoughts_as_an_item(running: EngineProcess):
    _, told, _ = respond(running, model="thinker", ignore_eos=True, max_output_tokens=12)
    assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
    assert get(running, f"/v1/responses/{told['id']}")[1] == told


# Names and defaults.


def test_a_route_answers_to_its_aliases(running: EngineProcess):
    body = {"model": "small", "prompt": "ab", "max_tokens": 3, "temperature": 0}
    _, told, _ = post(running, "/v1/completions", body)
    assert told["model"] == "small"
    assert told["choices"] == post(running, "/v1/completions", {**body, "model": "tiny"})[1]["choices"]
    listed = {each["id"]: each["root"] for each in get(running, "/v1/models")[1]["data"]}
    assert listed == {"tiny": "tiny", "small": "tiny", "thinker": "thinker"}
    assert get(running, "/v1/models/small")[1]["max_model_len"] == 200
    assert post(running, "/tokenize", {"model": "small", "prompt": "ab"})[0] == 200


def test_what_a_request_does_not_say_comes_from_the_models_files(running: EngineProcess):
    texts = [
        {chat(running, model=model, max_tokens=30)["choices"][0]["message"]["content"] for _ in range(4)}
        for model in ("thinker", "tiny")
    ]
    reasoned = {chat(running, max_tokens=30)["choices"][0]["message"]["reasoning_content"] for _ in range(4)}
    assert (len(texts[0]), len(reasoned)) == (1, 1)  # temperature 0, by generation_config.json
    assert len(texts[1]) > 1  # nothing says anything: 1
    warm = {chat(running, temperature=2.0)["choices"][0]["message"]["reasoning_content"] for _ in range(4)}
    assert len(warm) > 1


def test_the_configuration_beats_the_models_files(tmp_path):
    model = write(tmp_path / "tiny.gguf")
    toml = llm_toml("tiny", model, llm='reasoning = "none"')
    toml += "[deployment.defaults]\ntemperature = 0\n"
    with engine(toml, **DOOR) as running:
        running.wait_ready(120.0)
        until(lambda: get(running, "/readyz")[0] == 200, 10.0, "a ready door")
        texts = {chat(running, model="tiny", max_tokens=30)["choices"][0]["message"]["content"] for _ in range(4)}
        assert len(texts) == 1
