"""Small random models through real processes: what a model's own files bring about, and what no request may do."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ipc.client import Client
from ipc.errors import Code, EngineError
from ipc.messages import Delta, Echo, Ended, Failed, Finished, Message
from tests.models_tiny import FFN, HIDDEN, SPECIALS, TEMPLATE, tokenizer, write, write_folder
from tests.system.harness import EngineProcess, engine, until

LIMITS = """
[deployment.llm]
max_model_len = 200
num_blocks = 64
max_num_seqs = 8
max_batched_tokens = 32
[deployment.restart]
hang_floor_s = 60
"""
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + TEMPLATE


def toml(**models: Path) -> str:
    return "".join(f'[[deployment]]\nroute = "{route}"\nmodel = "{path}"\n{LIMITS}' for route, path in models.items())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """plain: a GGUF file. folder: Hugging Face, ends at 0 or 5, its template takes no system role. broken: token 77
    gives NaN; ids from 260 on have an embedding and no token. bare: no template."""
    directory = tmp_path_factory.mktemp("models")
    folder = write_folder(directory / "folder", eos_token_id=0, num_shards=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    (folder / "chat_template.jinja").write_text(STRICT)
    embedding = np.random.default_rng(1).normal(0, 0.3, (280, HIDDEN)).astype(np.float32)
    embedding[260:] *= 40  # what must not be sampled would always win
    embedding[77] = np.nan
    broken = write(
        directory / "broken.gguf", {"token_embd.weight": embedding, "output.weight": np.nan_to_num(embedding)}
    )
    bare = write_folder(directory / "bare")
    (bare / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[0]}))
    models = {"plain": write(directory / "plain.gguf"), "folder": folder, "broken": broken, "bare": bare}
    with engine(toml(**models)) as made:
        yield made.wait_ready(120.0)


@pytest.fixture
def client(running: EngineProcess) -> Iterator[Client]:
    with running.client() as made:
        yield made


def refused(client: Client, route: str, prompt: str | list[int], **options: object) -> EngineError:
    """The error of a request, after which its route serves as before."""
    with pytest.raises(EngineError) as caught:
        client.generate(route, prompt, **options)
    assert client.generate(route, [9, 10], max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    return caught.value


def test_a_row_of_nan_fails_by_name_and_alone(running: EngineProcess, client: Client):
    """vllm#22881: not-a-number logits became token 0 and a normal answer."""
    before = running.replicas()[2].num_non_finite
    neighbour = client.stream("broken", [9, 10], max_tokens=100, ignore_eos=True)
    error = refused(client, "broken", [77], max_tokens=4)
    assert (error.code, "not finite" in error.message) == (Code.INTERNAL, True)
    assert isinstance(list(neighbour)[-1], Finished)
    until(lambda: running.replicas()[2].num_non_finite > before, 5.0, "the count of rows that are not finite")
    assert [each.num_deaths for each in running.replicas()] == [0, 0, 0, 0]


def test_a_scored_prompt_of_nan_fails_by_name(client: Client):
    error = refused(client, "broken", [9, 77, 10], max_tokens=0, echo=True, logprobs=1)
    assert error.code is Code.INTERNAL


def test_ids_without_a_token_are_never_sampled(client: Client):
    """vllm#13175: rows of the head beyond the vocabulary."""
    answer = client.generate("broken", [9, 10], max_tokens=60, ignore_eos=True, temperature=1.0, seed=3, logprobs=20)
    assert max(answer.ids) < 260
    assert max(each.id for entry in answer.logprobs for each in entry.top) < 260
    assert refused(client, "broken", [260]).field == "prompt"


@pytest.mark.parametrize("id", [0, 5])
def test_each_id_that_ends_a_text_does(client: Client, id: int):
    """vllm#4182: one of several was honoured."""
    answer = client.generate("folder", "x", max_tokens=9, logit_bias={id: 100.0})
    assert (answer.ids, answer.text, answer.reason) == ([id], tokenizer().token_bytes(id).decode(), "stop")
    kept = client.generate("folder", "x", max_tokens=3, logit_bias={id: 100.0}, ignore_eos=True)
    assert (kept.ids, kept.reason) == ([id] * 3, "length")
    own = client.generate("folder", "x", max_tokens=3, logit_bias={id: 100.0}, ignore_eos=True, stop_ids=[id])
    assert (own.ids, own.reason) == ([id], "stop")


def test_text_held_back_for_a_stop_string_comes_when_the_text_ends(client: Client):
    """koboldcpp#1031."""
    (letter,) = tokenizer().encode("f")
    events = list(client.stream("plain", "x", max_tokens=3, logit_bias={letter: 100.0}, stop=["ffff"]))
    assert [each.text for each in events if isinstance(each, Delta | Finished)] == ["", "", "fff"]
    assert events[-1].reason == "length"


def test_a_stop_string_counts_from_min_tokens_on(client: Client):
    (letter,) = tokenizer().encode("f")
    options = {"max_tokens": 9, "logit_bias": {letter: 100.0}, "stop": ["ff"]}
    assert client.generate("plain", "x", **options).text == ""
    later = client.generate("plain", "x", min_tokens=4, **options)
    assert (later.text, len(later.ids), later.reason) == ("ffff", 6, "stop")


def test_what_ends_a_text_waits_for_min_tokens(client: Client):
    answer = client.generate("plain", "x", max_tokens=9, min_tokens=4, logit_bias={0: 100.0})
    assert (len(answer.ids), answer.ids[-1], answer.reason) == (5, 0, "stop")
    assert 0 not in answer.ids[:4]


def test_the_refusal_of_a_template_is_told(client: Client):
    """vllm#17119: it became an internal error."""
    error = refused(client, "folder", "", messages=[Message("system", "be nice"), Message("user", "hi")])
    assert (error.code, error.field) == (Code.INVALID, "messages")
    assert "no system role here" in error.message
    two = [Message("user", "a"), Message("user", "b")]
    assert client.generate("folder", "", messages=two, max_tokens=1, ignore_eos=True).usage.prompt_tokens > 10


def test_a_model_without_a_template_says_so_and_serves_prompts(client: Client):
    """vllm#39279."""
    error = refused(client, "bare", "", messages=[Message("user", "hi")])
    assert (error.code, error.field) == (Code.INVALID, "messages")
    assert "no chat template" in error.message


@pytest.mark.parametrize("role", ["", "User", "system\nA<|end|>", "root", "x" * 65])
def test_a_role_that_is_none_is_refused(client: Client, role: str):
    """The template writes a role as it is: an open door for control tokens."""
    assert refused(client, "plain", "", messages=[Message(role, "hi")]).field == "messages[0].role"


def test_roles_that_are_known(client: Client):
    """1Cat-vLLM#493."""
    counts = {
        role: client.generate("plain", "", messages=[Message(role, "hi")], max_tokens=1).usage.prompt_tokens
        for role in ("system", "developer", "user", "assistant", "tool")
    }
    assert counts["developer"] == counts["system"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": {260: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {2**70: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias[...]"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias[...]"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"stop_ids": [260]}, "stop_ids[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1e9}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e308}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 260}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 9}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["", "x"]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_what_is_out_of_bounds_is_named(client: Client, options: dict, field: str):
    started = time.monotonic()
    error = refused(client, "plain", "x", **options)
    assert error.code in {Code.INVALID, Code.TOO_LARGE}
    assert error.field.startswith(field.removesuffix("[0]").removesuffix("[...]"))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("prompt", ["", [], [260], [-1], [2**62], [1.5], [True], "\ud800", [""]])
def test_a_prompt_that_cannot_be_is_named(client: Client, prompt: object):
    """vllm#7283, #26797: an empty prompt or an id out of range stopped the engine."""
    error = refused(client, "plain", prompt)
    assert error.code is Code.INVALID
    assert error.field.startswith("prompt")


@pytest.mark.parametrize("top_k", [0, -1, 260, 261, 10**9])
def test_a_top_k_that_cuts_nothing(client: Client, top_k: int):
    """gemma#789."""
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    assert client.generate("plain", "x", top_k=top_k, **options).ids == client.generate("plain", "x", **options).ids


def test_top_p_zero_is_greedy_where_nothing_is_drawn(client: Client):
    greedy = client.generate("plain", "x", max_tokens=8, ignore_eos=True).ids
    assert client.generate("plain", "x", max_tokens=8, ignore_eos=True, top_p=0.0).ids == greedy


def test_equal_seeds_at_once_and_no_seed(client: Client):
    """tt-metal#53802: the same seed at once gave other text. mlx-vlm#1818: no seed gave always the same."""
    options = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    streams = [client.stream("plain", "x", seed=5, **options) for _ in range(4)]
    texts = ["".join(each.text for each in stream if isinstance(each, Delta | Finished)) for stream in streams]
    assert len(set(texts)) == 1
    assert len({client.generate("plain", "x", **options).text for _ in range(8)}) > 1


def test_several_answers(client: Client):
    options = {"max_tokens": 6, "temperature": 1.5, "seed": 9, "ignore_eos": True, "logprobs": 2}
    whole = client.generate("plain", "x", n=3, **options)
    assert [len(each.ids) for each in whole.choices] == [6, 6, 6]
    assert len({each.text for each in whole.choices}) > 1
    assert whole.usage.completion_tokens == 18
    assert [[entry.id for entry in each.logprobs] for each in whole.choices] == [each.ids for each in whole.choices]
    assert client.generate("plain", "x", n=3, **options).choices == whole.choices
    assert client.generate("plain", "x", **options).ids == whole.choices[0].ids
    events = list(client.stream("plain", "x", n=3, **options))
    assert [type(each) for each in events].count(Finished) == 1
    assert sorted(each.choice for each in events if isinstance(each, Ended)) == [0, 1, 2]
    for choice in range(3):
        parts = [each for each in events if isinstance(each, Delta | Ended) and each.choice == choice]
        assert [id for each in parts for id in each.ids] == whole.choices[choice].ids
        assert "".join(each.text for each in parts) == whole.choices[choice].text
    assert events[-1].usage == whole.usage


def test_more_answers_than_seats_are_free_wait_for_each_other(running: EngineProcess, client: Client):
    options = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    streams = [client.stream("plain", "x", n=5, seed=number, **options) for number in range(6)]
    for stream in streams:
        assert isinstance(list(stream)[-1], Finished)
    until(lambda: running.replicas()[0].num_free_blocks == 64, 5.0, "all blocks back")
    assert running.replicas()[0].num_in_flight == 0


def test_cancelling_several_answers_ends_them_all(running: EngineProcess, client: Client):
    with client.stream("plain", "x", n=4, max_tokens=180, ignore_eos=True) as stream:
        next(stream)
    until(lambda: running.replicas()[0].num_running == 0, 5.0, "nothing runs")
    until(lambda: running.replicas()[0].num_free_blocks == 64, 5.0, "all blocks back")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 40, 199])
def test_an_echoed_prompt_with_its_log_probabilities(client: Client, length: int, stream: bool):
    """vllm-metal#680: one entry per token, the first without a value, each its own; vllm#6521: nothing generated."""
    prompt = [2 + number % 200 for number in range(length)]
    options = {"echo": True, "logprobs": 1, "max_tokens": 0 if length == 199 else 3, "ignore_eos": True}
    if stream:
        events = list(client.stream("plain", prompt, **options))
        assert isinstance(events[0], Echo)
        ids = [id for each in events if isinstance(each, Echo) for id in each.ids]
        scores = [entry for each in events if isinstance(each, Echo) for entry in each.logprobs]
    else:
        told = client.generate("plain", prompt, **options)
        ids, scores = told.prompt.ids, told.prompt.logprobs
        assert told.usage.completion_tokens == options["max_tokens"]
        assert len(told.logprobs) == options["max_tokens"]
    assert ids == prompt
    assert [entry.id for entry in scores] == prompt
    assert scores[0].logprob is None
    assert all(entry.logprob is not None and -9999 <= entry.logprob <= 0 for entry in scores[1:])
    assert all(len(entry.top) == 1 and entry.top[0].logprob >= entry.logprob for entry in scores[1:])


def test_scores_of_a_prompt_are_those_of_its_tokens_when_generated(client: Client):
    answer = client.generate("plain", "ab", max_tokens=20, ignore_eos=True, logprobs=0)
    prompt = [*tokenizer().encode("ab"), *answer.ids]
    again = client.generate("plain", prompt, max_tokens=0, echo=True, logprobs=0)
    assert [entry.logprob for entry in again.prompt.logprobs[-20:]] == [entry.logprob for entry in answer.logprobs]


def test_an_echo_without_scores_and_of_a_conversation(client: Client):
    told = client.generate("plain", "ab 12", max_tokens=0, echo=True)
    assert (told.prompt.text, told.prompt.logprobs, told.text) == ("ab 12", [], "")
    turns = client.generate("plain", "", messages=[Message("user", "hi")], max_tokens=1, echo=True)
    assert turns.prompt.text == "user\nhiassistant\n"


def test_a_text_is_the_same_with_and_without_scores(client: Client):
    """djl-serving#3085: text was put together from the pieces of log probabilities."""
    bias = {id: 100.0 for id in tokenizer().encode("é")[:1]}
    plain = client.generate("plain", "x", max_tokens=4, logit_bias=bias)
    scored = client.generate("plain", "x", max_tokens=4, logit_bias=bias, logprobs=5)
    assert scored.text == plain.text == "\ufffd" * 4
    assert b"".join(entry.bytes for entry in scored.logprobs).decode(errors="replace") == scored.text
    assert all(len({each.id for each in entry.top}) == 5 for entry in scored.logprobs)


def test_special_names_are_parsed_only_when_asked(client: Client):
    assert client.generate("plain", "<|end|>", max_tokens=1).usage.prompt_tokens == 7
    assert client.generate("plain", "<|end|>", max_tokens=1, parse_special=True).usage.prompt_tokens == 1


def test_a_context_filled_to_its_end(client: Client):
    filled = client.generate("plain", "x", max_tokens=None, ignore_eos=True)
    assert (filled.usage.completion_tokens, filled.reason) == (199, "length")


def test_long_texts_are_taken_in_beside_running_streams(client: Client):
    stream = client.stream("plain", "x", max_tokens=190, ignore_eos=True)
    assert refused(client, "plain", "a" * 400_000).code is Code.TOO_LARGE
    request = client.stream("plain", "b" * 900_000, max_tokens=4)
    request.cancel()
    assert not isinstance(list(request)[-1], Finished)
    assert isinstance(list(stream)[-1], Finished)


def test_new_weights_do_not_meet_old_blocks(tmp_path: Path):
    """vllm#30931: the same route, other weights after a restart: nothing cached of the old ones counts."""
    path = write_folder(tmp_path / "model")
    prompt = [2 + number % 100 for number in range(60)]
    answers = []
    with engine(toml(model=path)) as running:
        for seed in (0, 1, 0):
            other = np.random.default_rng(seed).normal(0, 0.3, (FFN, HIDDEN)).astype(np.float32)
            write_folder(path, {"model.layers.0.mlp.up_proj.weight": other})
            pid = running.wait_ready(60.0).replicas()[0].pid
            os.kill(pid, signal.SIGKILL)
            until(
                lambda pid=pid: running.replicas()[0].pid not in {0, pid} and running.replicas()[0].state == "ready",
                60.0,
                "a new worker",
            )
            with running.client() as client:
                first = client.generate("model", prompt, max_tokens=8, ignore_eos=True)
                second = client.generate("model", prompt, max_tokens=8, ignore_eos=True)
            assert first.usage.cached_tokens == 0
            assert second.usage.cached_tokens > 0
            assert second.ids == first.ids
            answers.append(first.ids)
    assert answers[0] == answers[2] != answers[1]


def test_a_failed_event_is_the_last_of_several_answers(client: Client):
    events = list(client.stream("broken", [77], n=3, max_tokens=4))
    assert isinstance(events[-1], Failed)
    assert len(events) == 1


@pytest.mark.parametrize("route", ["../x", "/etc", "a/../../b", "a\0b", "/etc/passwd", "x" * 64])
def test_a_route_is_a_name_and_never_a_path(client: Client, route: str):
    """triton core#500: a model's name was joined to a path; the answer told whether the target exists."""
    with pytest.raises(EngineError) as caught:
        client.generate(route, "x")
    assert (caught.value.code, caught.value.field) == (Code.NOT_FOUND, "route")
