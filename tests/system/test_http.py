"""The HTTP door through real processes: third-party clients, shapes, errors, keys, health, and what goes wrong."""

import asyncio
import hashlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import openai
import psutil
import pytest

from ipc.client import Client
from ipc.messages import Delta, Finished
from tests.models_tiny import tokenizer, write, write_folder
from tests.system.harness import EngineProcess, engine, llm_toml, sim_toml, until
from tests.system.http_calls import (
    DOOR,
    address,
    chat,
    complete,
    events,
    gateways_of,
    get,
    get_or_none,
    is_listening,
    metric,
    post,
    raw,
    raw_post,
    send,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """tiny: a real decoder with a template. bare: the same without one. sim: the fake model, 10 ms a step."""
    directory = tmp_path_factory.mktemp("models")
    bare = write_folder(directory / "bare")
    (bare / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    models = {"tiny": write(directory / "tiny.gguf"), "bare": bare}
    toml = sim_toml(step_ms=10.0, restart="backoff_s = 0.0\nintensity = 100")
    toml += "".join(llm_toml(name, path, llm="max_batched_tokens = 32") for name, path in models.items())
    toml += "[http]\nkeepalive_s = 0.3\nread_s = 2.0\nwrite_s = 2.0\n"
    with engine(toml, **DOOR) as made:
        made.wait_ready(120.0)
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


@pytest.fixture
def api(running: EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# The openai package.


def test_the_openai_client_chats(api: openai.OpenAI):
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    whole = api.chat.completions.create(
        model="tiny", messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].finish_reason in {"stop", "length"}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)
    stream = api.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_the_openai_client_completes(api: openai.OpenAI):
    whole = api.completions.create(model="tiny", prompt="ab", max_tokens=4, temperature=0, echo=True, logprobs=1, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text.startswith("ab")
    told = whole.choices[0].logprobs
    assert told.token_logprobs[0] is None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 1 + 4
    assert all(token in top for token, top in zip(told.tokens[1:], told.top_logprobs[1:], strict=True))
    parts = api.completions.create(model="tiny", prompt=["ab", "x"], max_tokens=4, temperature=0, stream=True)
    texts: dict[int, str] = {}
    for part in parts:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    several = api.completions.create(model="tiny", prompt=["ab", "x"], max_tokens=4, temperature=0)
    assert [texts[0], texts[1]] == [choice.text for choice in several.choices]
    by_ids = api.completions.create(model="tiny", prompt=tokenizer().encode("ab"), max_tokens=4, temperature=0)
    assert by_ids.choices[0].text == several.choices[0].text


def test_the_openai_client_raises_what_it_should(api: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="nope", prompt="x")
    assert missing.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model="tiny", prompt="x" * 300)
    assert long.value.body["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        api.completions.create(model="tiny", prompt="x", temperature=-1)
    assert wrong.value.body["param"] == "temperature"
    assert [model.id for model in api.models.list()] == ["sim", "tiny", "bare"]
    assert api.models.retrieve("tiny").id == "tiny"


def test_the_openai_client_at_once(running: EngineProcess):
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as api:
            answers = await asyncio.gather(
                *(api.completions.create(model="sim", prompt=f"number {n}", max_tokens=20) for n in range(100))
            )
            return [answer.choices[0].text for answer in answers]

    assert len(asyncio.run(many())) == 100


def test_parts_of_letters_are_told_apart_in_completions_logprobs(api: openai.OpenAI):
    """lm-eval found choices greedy that were not: all parts of letters were one key, which hid the likeliest."""
    told = api.completions.create(model="tiny", prompt="жé€ " * 8, max_tokens=1, temperature=0, echo=True, logprobs=3)
    logprobs = told.choices[0].logprobs
    assert logprobs.tokens[:2] == ["bytes:\\xd0", "bytes:\\xb6"]
    num_unlikely = 0
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        if top is not None:
            assert top[token] == logprob
            assert len(top) in {3, 4}  # three alternatives, and the token itself where it is none of them
            num_unlikely += len(top) == 4
    assert num_unlikely > 20


# One request by four ways.


@pytest.mark.parametrize("stop", [[], ["a"], ["ab"]])
@pytest.mark.parametrize("seed", range(4))
def test_four_ways_give_the_same(running: EngineProcess, stop: list[str], seed: int):
    """vllm#57052: one of several paths differed."""
    fields = {"model": "tiny", "prompt": "ab 12", "max_tokens": 30, "temperature": 1.5, "seed": seed, "stop": stop}
    fields["return_token_ids"] = True
    _, plain, _ = post(running, "/v1/completions", fields)
    _, text, _ = post(running, "/v1/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(text)
    options = {"max_tokens": 30, "temperature": 1.5, "seed": seed, "stop": stop}
    with running.client() as client:
        whole = client.generate("tiny", "ab 12", **options)
        parts = [each for each in client.stream("tiny", "ab 12", **options) if isinstance(each, Delta | Finished)]
    streamed = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert plain["choices"][0]["text"] == streamed == whole.text == "".join(each.text for each in parts)
    streamed_ids = [id for chunk in chunks for choice in chunk["choices"] for id in choice.get("token_ids", [])]
    assert plain["choices"][0]["token_ids"] == streamed_ids == whole.ids == [id for each in parts for id in each.ids]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == plain["choices"][0]["finish_reason"] == whole.reason == parts[-1].reason
    assert set(reasons[:-1]) <= {None}
    counted = whole.usage.prompt_tokens, whole.usage.completion_tokens
    assert (plain["usage"]["prompt_tokens"], plain["usage"]["completion_tokens"]) == counted
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == counted


# Shapes of streams.


def test_the_order_of_a_chat_stream(running: EngineProcess):
    """hermes-agent#91373: every chunk has finish_reason, null until the last; usage only when asked for."""
    _, text, told = chat(running, stream=True, max_tokens=3, ignore_eos=True, n=2)
    chunks = events(text)
    assert told["content-type"].startswith("text/event-stream")
    assert all("usage" not in chunk for chunk in chunks)
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    _, text, _ = chat(running, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counted = [chunk["usage"]["completion_tokens"] for chunk in events(text)]
    assert counted == sorted(counted)
    assert events(text)[-1]["choices"] == []
    assert events(text)[1]["usage"]["prompt_tokens"] == events(text)[-1]["usage"]["prompt_tokens"] > 0


def test_a_fault_in_mid_stream_is_an_event_and_the_end(running: EngineProcess):
    """vllm-mlx#101: no final marker, and the socket left open."""
    with socket.create_connection(address(running), 10) as connection, connection.makefile("rb") as answer:
        connection.sendall(raw_post("/v1/completions", {**SIM_LONG, "prompt": "x", "stream": True}))
        while not answer.readline().startswith(b"data: "):
            pass
        (pid,) = [replica.pid for replica in running.replicas() if replica.route == "sim"]
        os.kill(pid, signal.SIGKILL)
        rest = []
        while not (line := answer.readline()).startswith(b"0\r"):  # the last chunk: the response ends
            assert line
            rest.append(line)
    last = [line for line in rest if line.startswith(b"data: ")][-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    assert not any(b"[DONE]" in line for line in rest)
    running.wait_ready()
    assert complete(running, model="sim", stream=True, n=0)[0] == 400


def test_comments_keep_a_waiting_stream_alive(tmp_path: Path):
    """vllm#54424: a silent stream was closed by proxies."""
    toml = sim_toml(seats=1, step_ms=50.0) + "[http]\nkeepalive_s = 0.2\n"
    with engine(toml, **DOOR) as running:
        running.wait_ready()
        with running.client() as client, client.stream("sim", "x", max_tokens=40, ignore_eos=True) as first:
            next(first)
            _, text, _ = post(
                running, "/v1/completions", {"model": "sim", "prompt": "y", "max_tokens": 2, "stream": True}
            )
    assert text.startswith(": waiting\n\n")
    assert text.count(": waiting") >= 4
    assert events(text)[-1]["choices"][0]["finish_reason"] == "length"


# What is wrong with a request.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**62]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x" * 200}, "prompt"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0, "temperature": 1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 9}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["", "x"]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"priority": "first"}, "priority"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"model": 3}, "model"),
    ],
)
def test_a_completion_that_is_wrong_is_a_400_naming_it(running: EngineProcess, fields: dict, param: str):
    status, body, told = complete(running, **fields)
    assert status == 400, body
    assert str(body["error"]["param"]).startswith(param.split("[")[0])
    assert body["error"]["type"] == "invalid_request_error"
    assert told["x-should-retry"] == "false"
    assert complete(running, temperature=0)[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system\nA<|end|>", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"model": "bare"}, "messages"),
    ],
)
def test_a_chat_that_is_wrong_is_a_400_naming_it(running: EngineProcess, fields: dict, param: str):
    status, body, _ = chat(running, **fields)
    assert status == 400, body
    assert str(body["error"]["param"]).replace("[]", "[0]").startswith(param.split("[")[0])


def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_know(running: EngineProcess):
    """litellm and langchain know it by these words, and choose a longer model then; a bare 400 was their own fault."""
    for ask, fields in (
        (complete, {"prompt": "x" * 300}),
        (chat, {"messages": [{"role": "user", "content": "x" * 300}]}),
    ):
        status, body, _ = ask(running, **fields)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "prompt is too long" in body["error"]["message"]


def test_what_is_tolerated(running: EngineProcess):
    """Fields that nobody knows, nulls, tools that are none: clients send them."""
    extra = {
        "user": "u",
        "metadata": {"a": 1},
        "store": False,
        "tools": [],
        "tool_choice": "none",
        "seed": None,
        "x": [1],
    }
    assert chat(running, **extra, max_tokens=None, max_completion_tokens=2)[0] == 200
    assert chat(running, logprobs=True)[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert complete(running, max_tokens=None)[1]["usage"]["completion_tokens"] <= 16
    assert chat(running, messages=[{"role": "user", "content": None}, {"role": "developer", "content": "x"}])[0] == 200
    assert complete(running, top_k=-1, top_p=0, temperature=0)[0] == 200
    assert complete(running, seed=-5, temperature=1)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xef\xbb\xbf{}",
        '{"model": "tiny"}'.encode("utf-16"),
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e400}',
        b'{"model": "tiny", "prompt": "x"} trailing',
        b'{"model": "tiny", "prompt": "x", "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 200_000,
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
    ],
)
def test_odd_json_is_a_400(running: EngineProcess, body: bytes):
    status, answer, _ = post(running, "/v1/completions", body)
    assert (status, "error" in answer) == (400, True)


def test_bodies_that_are_too_large_or_of_another_kind(running: EngineProcess):
    assert post(running, "/v1/completions", b" " * 2_000_000)[0] == 413
    for kind in ("text/xml", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream"):
        assert post(running, "/v1/completions", b"{}", **{"Content-Type": kind})[0] == 415
    # A page of another origin may send a body of no type without asking first: it does not get in.
    body = b'{"model": "sim", "prompt": "x", "max_tokens": 1}'
    assert send(running, "POST", "/v1/completions", body)[0] == 415
    with raw(running, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n") as answer:
        assert answer.startswith(b"HTTP/1.1 4")
    with raw(
        running,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    ) as answer:
        assert answer.startswith(b"HTTP/1.1 408")  # the rest never came


def test_probes_may_ask_for_the_head_alone(running: EngineProcess):
    for path in ("/livez", "/readyz", "/startupz", "/health", "/v1/models"):
        status, body, told = send(running, "HEAD", path)
        assert (status, body) == (200, b"")
        assert int(told["content-length"]) > 0


def test_paths_and_methods_that_are_none(running: EngineProcess):
    """uor-r4#764: an empty body that was no JSON."""
    for method, path, expected in (
        ("GET", "/v1/nope", 404),
        ("DELETE", "/v1/chat/completions", 405),
        ("GET", "//v1/models", 404),
    ):
        status, body, _ = send(running, method, path)
        assert (status, "error" in json.loads(body)) == (expected, True)
    status, body, _ = get(running, "/v1/models/nope")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


# Tokens.


def test_tokens_of_a_text_and_back(running: EngineProcess):
    status, told, _ = post(running, "/tokenize", {"model": "tiny", "prompt": "ab 12"})
    assert (status, told["tokens"], told["count"], told["max_model_len"]) == (200, tokenizer().encode("ab 12"), 4, 200)
    assert post(running, "/detokenize", {"model": "tiny", "tokens": told["tokens"]})[1] == {"prompt": "ab 12"}
    messages = [{"role": "user", "content": "hi"}]
    count = post(running, "/tokenize", {"model": "tiny", "messages": messages})[1]["count"]
    assert count == chat(running)[1]["usage"]["prompt_tokens"]
    assert post(running, "/tokenize", {"model": "tiny"})[0] == 400
    assert post(running, "/tokenize", {"model": "nope", "prompt": "x"})[0] == 404
    assert post(running, "/detokenize", {"model": "tiny", "tokens": [260]})[0] == 400


# Who goes away.


SIM_LONG = {"model": "sim", "max_tokens": 3000, "ignore_eos": True}


@pytest.mark.parametrize("way", ["stream", "plain", "queued", "prefilling"])
def test_clients_that_leave_cost_nothing(running: EngineProcess, way: str):
    """mini-sglang#15, ATOM#1562: decode ran on for a client that was gone, streaming or not, queued or prefilling."""
    sim = lambda: running.replicas()[0]  # noqa: E731 - asked again and again
    prompt = "x" * 1500 if way == "prefilling" else "x"
    data = raw_post("/v1/completions", {**SIM_LONG, "prompt": prompt, "stream": way in {"stream", "queued"}})
    num_left = 0
    while num_left < 100:
        # A seat for each at once, or, where they shall wait for one, far more than there are.
        connections = [socket.create_connection(address(running), 10) for _ in range(100 if way == "queued" else 10)]
        for connection in connections:
            connection.sendall(data)
        if way == "stream":
            for connection in connections:
                seen = b""
                while b"data: " not in seen:
                    seen += connection.recv(4096)
        elif way == "queued":
            until(lambda: metric(running, "vllm:num_requests_waiting", model_name="sim") >= 80, 10.0, "they wait")
        else:
            until(lambda: sim().num_in_flight, 10.0, "a worker has some")
        for connection in connections:
            connection.close()
        num_left += len(connections)
        until(lambda: (sim().num_running, sim().num_in_flight) == (0, 0), 10.0, "nothing runs")
    until(lambda: sim().num_free_blocks == sim().num_blocks, 5.0, "all blocks back")
    until(lambda: metric(running, "vllm:num_requests_running", model_name="sim") == 0, 5.0, "the gauge at base")
    assert metric(running, "vllm:num_requests_waiting", model_name="sim") == 0
    status = running.status()
    assert status is not None
    assert status.counters.num_open == 0


def test_a_client_that_does_not_read_is_cut_alone(running: EngineProcess):
    data = raw_post("/v1/completions", {**SIM_LONG, "prompt": "x", "stream": True})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(running))
        slow.sendall(data)
        started = time.monotonic()
        assert complete(running, model="sim", max_tokens=20)[0] == 200
        assert time.monotonic() - started < 3
    until(lambda: running.replicas()[0].num_in_flight == 0, 10.0, "it is over")


# Health and metrics.


def test_health_tells_the_truth_within_a_second():
    """kserve#6259: health said yes with the engine dead."""
    with engine(sim_toml(restart="backoff_s = 3.0\nbackoff_max_s = 3.0") + "", ENGINE_HTTP_GATEWAYS="1") as running:
        until(lambda: is_listening(running), 10.0, "a door")
        running.wait_ready()
        until(lambda: get(running, "/readyz")[0] == 200, 5.0, "ready")
        assert get(running, "/startupz")[0] == 200
        for path in ("/health", "/livez"):
            assert get(running, path)[0] == 200
        os.kill(running.replicas()[0].pid, signal.SIGKILL)
        started = time.monotonic()
        until(lambda: get(running, "/readyz")[0] == 503, 5.0, "not ready")
        assert time.monotonic() - started < 1.5
        assert get(running, "/livez")[0] == 200
        status, body, _ = post(running, "/v1/completions", {"model": "sim", "prompt": "x", "deadline_ms": 200})
        assert (status, body["error"]["code"]) in {(504, "expired"), (503, "unavailable")}
        until(lambda: get(running, "/readyz")[0] == 200, 10.0, "ready again")


def test_an_engine_that_stands_still_is_not_alive():
    """Where nothing but /livez is asked, a frozen front would stay for ever behind gateways that answer."""
    with engine(sim_toml(), **DOOR) as running:
        running.wait_ready()
        until(lambda: get(running, "/readyz")[0] == 200, 5.0, "ready")
        running.signal(signal.SIGSTOP)
        try:
            stopped_at = time.monotonic()
            until(lambda: get(running, "/readyz")[0] == 503, 5.0, "not ready")
            assert get(running, "/livez")[0] == 200
            until(lambda: get(running, "/livez")[0] == 503, 10.0, "not alive")
            assert time.monotonic() - stopped_at > 4.0
        finally:
            running.signal(signal.SIGCONT)
        until(lambda: {get(running, path)[0] for _ in range(4) for path in ("/livez", "/readyz")} == {200}, 10.0)


def test_metrics_add_up_and_show_nothing_of_the_dead(running: EngineProcess):
    """vllm#45118 and its like: aborted requests counted, gauges back, no negative step, no series of a dead worker."""
    before = {
        reason: metric(running, "engine_requests_total", route="tiny", outcome=reason) or 0
        for reason in ("length", "cancelled")
    }
    for _ in range(3):
        assert complete(running, ignore_eos=True)[0] == 200
    with running.client() as client, client.stream("tiny", "x", max_tokens=190, ignore_eos=True) as stream:
        next(stream)
    until(
        lambda: metric(running, "engine_requests_total", route="tiny", outcome="cancelled") == before["cancelled"] + 1
    )
    assert metric(running, "engine_requests_total", route="tiny", outcome="length") == before["length"] + 3
    until(lambda: metric(running, "vllm:num_requests_running", model_name="tiny") == 0)
    assert metric(running, "engine_little_ratio", route="tiny") == pytest.approx(1.0, abs=0.02)
    assert 0 <= (metric(running, "engine_useful_ratio", route="tiny") or 0) <= 1
    until(lambda: (metric(running, "vllm:inter_token_latency_seconds_count", model_name="tiny") or 0) > 0)
    (replica,) = [each for each in running.replicas() if each.route == "tiny"]
    os.kill(replica.pid, signal.SIGKILL)
    slot = str(replica.slot)
    until(lambda: metric(running, "engine_replica_ready", slot=slot) == 0)
    assert metric(running, "engine_running_sequences", slot=slot) is None
    running.wait_ready(60.0)
    until(lambda: metric(running, "engine_worker_restarts_total", slot=slot) == replica.num_deaths + 1)
    assert metric(running, "engine_requests_total", route="tiny", outcome="length") == before["length"] + 3


def test_the_page_of_metrics_is_well_formed(running: EngineProcess):
    from prometheus_client.parser import text_string_to_metric_families

    _, text, told = get(running, "/metrics")
    families = {family.name for family in text_string_to_metric_families(text)}
    assert told["content-type"].startswith("text/plain")
    assert {
        "vllm:num_requests_running",
        "vllm:time_to_first_token_seconds",
        "engine_state",
        "engine_http_requests",
    } <= families


# Keys.


KEY = "sk-right-Bearer key"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    low = hashlib.sha256(b"low").hexdigest()
    first = f'[[key]]\nsha256 = "{digest}"\ntenant = "a"\n'
    second = f'[[key]]\nsha256 = "{low}"\nceiling = "batch"\nopen_max = 1\ntenant = "low"\n'
    path.write_text(first + second)
    with engine(sim_toml() + f'[http]\napi_keys_file = "{path}"\n', **DOOR) as made:
        made.wait_ready()
        until(lambda: get(made, "/readyz")[0] == 200, 10.0, "a ready door")
        yield made


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic " + KEY,
        KEY,
        "Bearer wrong",
        "Bearer Bearer " + KEY,
        "Bearer k\xe9y",
        "Bearer " + "x" * 5000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nope", "//v1/models", "/v1/models/sim"])
def test_without_a_right_key_nothing_but_health_answers(guarded: EngineProcess, header: str | None, path: str):
    """Rapid-MLX#1271: a key in latin-1 was a 500; "Bearer " was removed anywhere."""
    status, body, told = get(guarded, path, **({} if header is None else {"Authorization": header}))
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert told["www-authenticate"] == "Bearer"
    assert get(guarded, "/livez")[0] == get(guarded, "/health")[0] == 200


def test_with_a_right_key(guarded: EngineProcess):
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert get(guarded, "/v1/models", **bearer)[0] == 200
    assert get(guarded, "/v1/models", Authorization=f"bearer {KEY}")[0] == 200
    assert (
        post(
            guarded,
            "/v1/completions",
            {"model": "sim", "prompt": "x", "priority": "realtime"},
            Authorization="Bearer low",
        )[0]
        == 200
    )
    two = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    with socket.create_connection(address(guarded), 10) as connection:
        connection.sendall(two.encode())
        assert b" 401 " in connection.recv(4096)
    assert KEY not in guarded.log()
    assert "sk-right" not in guarded.log()


def test_a_key_bounds_the_open_requests_of_its_tenant_over_all_gateways(guarded: EngineProcess):
    body = {"model": "sim", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with socket.create_connection(address(guarded), 10) as connection:
        connection.sendall(raw_post("/v1/completions", body, "Authorization: Bearer low"))
        seen = b""
        while b"data: " not in seen:
            seen += connection.recv(4096)
        short = {"model": "sim", "prompt": "x", "max_tokens": 1}
        for _ in range(6):
            status, told, headers = post(guarded, "/v1/completions", short, Authorization="Bearer low")
            assert (status, told["error"]["code"], "retry-after" in headers) == (429, "rate_limit_exceeded", True)
        assert post(guarded, "/v1/completions", short, Authorization=f"Bearer {KEY}")[0] == 200
    until(lambda: post(guarded, "/v1/completions", short, Authorization="Bearer low")[0] == 200, 5.0, "room again")


def test_prompts_and_ids_do_not_reach_the_log(running: EngineProcess):
    """mlx-openai-server#287: ids were logged as they came."""
    marker = "MARKER-7261"
    complete(running, prompt=marker)
    complete(running, prompt=marker, temperature=-1)
    for odd in (f"{marker}" + "x" * 1000, f"{marker} <b>", f"{marker}\xe9"):
        _, _, told = get(running, "/v1/models", **{"x-request-id": odd})
        assert told["x-request-id"] != odd
        assert len(told["x-request-id"]) <= 128
    with raw(running, f"GET /livez HTTP/1.1\r\nHost: x\r\nx-request-id: {marker}\x1b[31m\r\n\r\n".encode()) as answer:
        assert b" 400 " in answer  # no header has control characters
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert b"aiohttp" not in answer
    assert get(running, "/v1/models", **{"x-request-id": "plain-1"})[2]["x-request-id"] == "plain-1"
    until(lambda: "request=plain-1" in running.log(), 5.0, "the last line is written")
    log = running.log()
    assert marker not in log
    assert [line for line in log.splitlines() if not line.startswith(("timestamp=", "worker "))] == []
    assert "path=/v1/models" in log
    assert "path=/livez" not in log  # probes and scrapes have no lines
    assert "path=/metrics" not in log


# What keeps it up.


def test_a_gateway_that_dies_is_started_again(running: EngineProcess):
    gateways = gateways_of(running)
    assert len(gateways) == 2
    for each in gateways:
        each.kill()
    assert get(running, "/livez")[0] == 200  # the connection waits in the socket meanwhile
    until(lambda: get(running, "/readyz")[0] == 200, 10.0, "ready again")


def test_a_port_that_is_taken_is_named(running: EngineProcess):
    port = str(urlparse(running.url).port)
    with engine(sim_toml(), ENGINE_HTTP_GATEWAYS="1", ENGINE_HTTP_PORT=port) as other:
        assert other.wait_exit() == 69
        assert f"127.0.0.1:{port} cannot be listened on" in other.log()


def test_a_drain_ends_streams_and_gateways():
    with engine(sim_toml(), **DOOR) as running:
        running.wait_ready()
        until(lambda: get(running, "/readyz")[0] == 200, 10.0, "ready")
        body = {"model": "sim", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(post(running, "/v1/completions", body)))
        thread.start()
        until(lambda: running.replicas()[0].num_running == 1, 5.0, "it runs")
        children = psutil.Process(running.pid).children(recursive=True)
        running.signal(signal.SIGTERM)
        until(lambda: not children or get_or_none(running, "/readyz") != 200, 5.0, "not ready")
        thread.join()
        assert answers[0][0] == 200
        assert events(answers[0][1])[-1]["choices"][0]["finish_reason"] == "length"
        assert running.wait_exit() == 0
        assert not any(child.is_running() for child in children)


def test_malformed_bytes_never_make_a_fault(running: EngineProcess):
    """Mutations of good requests over raw sockets: no 5xx, no hang, no growth."""
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    good = raw_post("/v1/completions", fields, "Connection: close")
    dice = random.Random(11)
    gateways = gateways_of(running)
    before = sum(each.memory_info().rss for each in gateways)
    for _ in range(400):
        data = bytearray(good)
        for _ in range(dice.randint(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if dice.random() < 0.3:
            del data[dice.randrange(len(data)) :]
        with socket.create_connection(address(running), 10) as connection:
            connection.settimeout(10)
            connection.sendall(bytes(data))
            connection.shutdown(socket.SHUT_WR)
            try:
                answer = connection.recv(64)
            except ConnectionResetError:
                answer = b""
        assert not answer.startswith(b"HTTP/1.1 5"), (bytes(data), answer)
    assert get(running, "/livez")[0] == 200
    assert sum(each.memory_info().rss for each in gateways if each.is_running()) - before < 40 * 2**20
    assert complete(running)[0] == 200


def test_the_native_client_still_works_beside_it(running: EngineProcess):
    with running.client() as client:
        assert isinstance(client, Client)
        assert client.generate("sim", "x", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
