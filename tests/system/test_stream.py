"""A real engine with the fake model answers: whole, streamed, many at once, and exactly what the hash chain says."""

import asyncio
from collections.abc import Iterator

import pytest

from engine.llm.detokenizer import Detokenizer
from engine.llm.tokenizer import ByteTokenizer
from engine.sim.model import Oracle, expected_ids
from ipc.client import AsyncClient, Client, client_address
from ipc.errors import Code, EngineError
from ipc.messages import Delta, Event, Finished
from tests.system.harness import EngineProcess, engine, sim_toml, until


@pytest.fixture(scope="module")
def running() -> Iterator[EngineProcess]:
    with engine(sim_toml(replicas=2, seats=32, num_blocks=1024)) as made:
        yield made.wait_ready()


@pytest.fixture
def client(running: EngineProcess) -> Iterator[Client]:
    with running.client() as made:
        yield made


def chain(prompt: str, seed: int, count: int) -> list[int]:
    return list(expected_ids("sim-1", list(prompt.encode()), seed, 0, 257, count))


def joined(events: list[Event]) -> tuple[str, list[int]]:
    parts = [each for each in events if isinstance(each, Delta | Finished)]
    return "".join(each.text for each in parts), [id for each in parts for id in each.ids]


def test_a_whole_answer(client: Client):
    answer = client.generate("sim", "hello", max_tokens=20, seed=4, ignore_eos=True)
    assert answer.ids == chain("hello", 4, 20)
    assert (answer.reason, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("length", 5, 20)
    assert answer.text == bytes(id for id in answer.ids if id < 256).decode("utf-8", "replace")


def test_a_streamed_answer_is_the_whole_one_in_pieces(client: Client):
    events = list(client.stream("sim", "hello", max_tokens=30, seed=4, ignore_eos=True))
    assert all(isinstance(each, Delta) for each in events[:-1])
    assert isinstance(events[-1], Finished)
    whole = client.generate("sim", "hello", max_tokens=30, seed=4, ignore_eos=True)
    assert joined(events) == (whole.text, whole.ids)
    index = 0
    for each in events:
        assert each.index == index
        index += len(each.ids)


def test_token_ids_as_a_prompt(client: Client):
    ids = [256, 1, 2, 3]
    answer = client.generate("sim", ids, max_tokens=5, seed=1, ignore_eos=True)
    assert answer.ids == list(expected_ids("sim-1", ids, 1, 0, 257, 5))


def test_an_unseeded_request_gets_a_seed_and_says_which(client: Client):
    first = client.generate("sim", "x", max_tokens=12, ignore_eos=True)
    second = client.generate("sim", "x", max_tokens=12, ignore_eos=True)
    assert first.seed != second.seed
    assert first.ids == chain("x", first.seed, 12)
    assert client.generate("sim", "x", max_tokens=12, ignore_eos=True, seed=first.seed).ids == first.ids


def test_a_stop_string_ends_the_text_before_it(client: Client):
    ids = chain("stop here", 9, 60)
    text = Detokenizer(ByteTokenizer()).push(ids)
    stop = text[20:22]
    answer = client.generate("sim", "stop here", max_tokens=60, seed=9, ignore_eos=True, stop=[stop])
    assert answer.reason == "stop"
    assert answer.matched == stop
    assert answer.text == text[: text.index(stop)]
    events = list(client.stream("sim", "stop here", max_tokens=60, seed=9, ignore_eos=True, stop=[stop]))
    assert joined(events) == (answer.text, answer.ids)


def test_the_end_of_text_and_stop_ids(client: Client):
    ids = chain("ids", 3, 30)
    answer = client.generate("sim", "ids", max_tokens=30, seed=3, ignore_eos=True, stop_ids=[ids[10]])
    assert answer.ids == ids[: ids.index(ids[10]) + 1]
    assert answer.reason == "stop"
    answer = client.generate("sim", "ids", max_tokens=30, seed=3, ignore_eos=True, stop_ids=[ids[4]], min_tokens=20)
    assert answer.usage.completion_tokens >= 20


def test_the_same_prompt_is_cached_the_second_time(client: Client):
    """ROCm/ATOM#939: the prefix cache silently never hit."""
    prompt = "cache me " * 20
    used = [client.generate("sim", prompt, max_tokens=3, seed=1, ignore_eos=True).usage for _ in range(6)]
    # Two replicas, each with a cache of its own: on each the first time finds nothing, every later one all blocks.
    found = sorted(usage.cached_tokens for usage in used)
    assert used[0].cached_tokens == 0
    assert found[2:] == [len(prompt) // 16 * 16] * 4
    assert found[1] in {0, len(prompt) // 16 * 16}
    salted = client.generate("sim", prompt, max_tokens=3, seed=1, ignore_eos=True, cache_salt="other")
    assert salted.usage.cached_tokens == 0
    assert salted.ids == chain(prompt, 1, 3)


def test_many_streams_over_one_connection_and_over_many(running: EngineProcess):
    async def one(client: AsyncClient, number: int) -> None:
        prompt = f"stream {number % 7}"
        oracle = Oracle("sim-1", list(prompt.encode()), number, 0, 257)
        stream = await client.stream("sim", prompt, max_tokens=60, seed=number, ignore_eos=True)
        async for event in stream:
            assert isinstance(event, Delta | Finished), event
            oracle.check(event.ids)
        assert oracle.num_checked == 60

    async def all_of_them() -> None:
        address = client_address(running.run_dir)
        clients = [AsyncClient(address) for _ in range(10)]
        for client in clients:
            await client.connect()
        await asyncio.gather(
            *(one(clients[0], number) for number in range(100)),
            *(one(clients[number % 10], number) for number in range(100, 160)),
        )
        for client in clients:
            await client.close()

    asyncio.run(all_of_them())
    until(lambda: blocks_are_back(running), what="blocks back to base")


def blocks_are_back(running: EngineProcess) -> bool:
    return all(each.num_free_blocks == each.num_blocks for each in running.replicas())


@pytest.mark.parametrize(
    ("route", "prompt", "options", "code", "field"),
    [
        ("nowhere", "x", {}, Code.NOT_FOUND, "route"),
        ("sim", "", {}, Code.INVALID, "prompt"),
        ("sim", [1, 257], {}, Code.INVALID, "prompt"),
        ("sim", "x" * 4096, {}, Code.TOO_LARGE, "prompt"),
        ("sim", "x", {"max_tokens": 0}, Code.INVALID, "max_tokens"),
        ("sim", "x", {"stop": [""]}, Code.INVALID, "stop"),
        ("sim", "x", {"stop": ["a"] * 17}, Code.INVALID, "stop"),
        ("sim", "x", {"priority": "urgent"}, Code.INVALID, "priority"),
        ("sim", "x", {"seed": -1}, Code.INVALID, "seed"),
        ("sim", "x", {"min_tokens": 9, "max_tokens": 8}, Code.INVALID, "min_tokens"),
        ("sim", "x", {"no_such_option": 1}, Code.INVALID, "no_such_option"),
    ],
)
def test_what_is_wrong_is_named(client: Client, route: str, prompt: str, options: dict, code: Code, field: str):
    with pytest.raises(EngineError) as caught:
        client.generate(route, prompt, **options)
    assert caught.value.code is code
    assert caught.value.field.startswith(field)
    assert client.generate("sim", "still here", max_tokens=2, ignore_eos=True).reason == "length"


def test_a_prompt_over_the_size_the_front_reads_is_checked_by_the_worker(client: Client):
    with pytest.raises(EngineError) as caught:
        client.generate("sim", "x" * 300_000)
    assert (caught.value.code, caught.value.field) == (Code.TOO_LARGE, "prompt")
    with pytest.raises(EngineError) as caught:
        client.generate("sim", "x" * 1_048_570)
    assert (caught.value.code, caught.value.field) == (Code.TOO_LARGE, "body")
    assert not caught.value.is_retryable
    assert client.generate("sim", "still here", max_tokens=2, ignore_eos=True).reason == "length"


def test_models_and_status(client: Client, running: EngineProcess):
    (model,) = client.models()
    assert (model.route, model.is_ready, model.max_model_len, model.version) == ("sim", True, 4096, "sim-1")
    report = client.status()
    assert report.state == "ready"
    assert report.pid == running.pid
    assert [each.state for each in report.replicas] == ["ready", "ready"]
    counters = report.counters
    ended = counters.finished + counters.failed + counters.cancelled + counters.expired
    assert counters.accepted == ended + counters.num_open
