"""The fake model: pinned values of the hash chain, faults of the KV cache that must show, and time on a
fake clock.
"""

import subprocess
import sys
from collections.abc import Sequence as Seq
from dataclasses import fields
from hashlib import blake2b

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.llm import runner as plug
from engine.llm.runner import PENDING_TOKEN, Row
from engine.sim import model
from engine.sim.model import Oracle, SimOptions, SimRunner, expected_ids, first, following, token

V = 257


class HandClock:
    """Stands still until slept on or moved."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.at += duration_s


def make_runner(**options: object) -> SimRunner:
    clock = HandClock()
    base: dict[str, object] = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 4}
    return SimRunner(SimOptions(**(base | options)), clock, clock.sleep)  # type: ignore[arg-type]


def row(
    ids: Seq[int],
    table: Seq[int],
    *,
    start: int = 0,
    prompt: int | None = None,
    seat: int = 0,
    seed: int = 7,
    choice: int = 0,
    sampled: bool = True,
) -> Row:
    length = len(ids) if prompt is None else prompt
    return Row(seat, start, list(ids), table, length, seed, choice, sampled)


def step(runner: SimRunner, *rows: Row) -> list[int]:
    return runner.launch(list(rows)).wait()


def expected(prompt: Seq[int], count: int, seed: int = 7, choice: int = 0) -> list[int]:
    return list(expected_ids("sim-1", prompt, seed, choice, V, count))


def generate(runner: SimRunner, prompt: Seq[int], table: Seq[int], count: int) -> list[int]:
    ids = step(runner, row(prompt, table))
    while len(ids) < count:
        start = len(prompt) + len(ids) - 1
        ids += step(runner, row([PENDING_TOKEN], table, start=start, prompt=len(prompt)))
    return ids


def test_pinned_values_of_the_chain() -> None:
    """A client in another language checks its own chain against these."""
    assert first("sim-1", [], 0, 0).hex() == "8fde2ec5ba7b7a12"
    assert first("sim-1", [104, 105], 7, 0).hex() == "ef9d7232207cef6c"
    assert expected([104, 105], 12) == [185, 250, 85, 15, 97, 153, 155, 206, 219, 116, 104, 170]
    assert expected([104, 105], 6, choice=1) == [200, 85, 83, 9, 165, 26]
    assert expected([104, 105], 6, seed=8) == [95, 127, 95, 221, 18, 36]
    assert list(expected_ids("sim-2", [104, 105], 7, 0, V, 6)) == [104, 13, 193, 189, 14, 250]
    assert list(expected_ids("sim-1", [0], -1, 0, 256, 6)) == [52, 205, 238, 134, 92, 137]


def test_the_chain_is_these_bytes() -> None:
    head = b"\x05\0\0\0sim-1" + b"\x08\0\0\0" + b"\x07" + b"\0" * 7 + b"\x04\0\0\0" + b"\x01\0\0\0"
    h = blake2b(head + b"\x08\0\0\0" + b"h\0\0\0" + b"\0\x01\0\0", digest_size=8).digest()
    assert first("sim-1", [104, 256], 7, 1) == h
    assert token(h, V) == int.from_bytes(h, "little") % V
    assert following(h, 256) == blake2b(h + b"\0\x01\0\0", digest_size=8).digest()


def test_a_field_never_flows_into_the_next() -> None:
    assert first("sim", [45], 0, 0) != first("sim-", [], 0, 0)
    assert len({first("s", [], seed, choice) for seed in (0, 1, -1, 2**63) for choice in (0, 1)}) == 8
    assert first("s", [], -1, 0) == first("s", [], 2**64 - 1, 0)


def test_the_runner_fits_the_plug() -> None:
    runner: plug.Runner = SimRunner(SimOptions())
    handle: plug.Handle = runner.launch([row([1], [0])])
    assert handle.poll()
    assert model.PENDING_TOKEN == plug.PENDING_TOKEN
    names = [field.name for field in fields(Row)]
    assert [*model.SimRow.__annotations__] == names[: names.index("sampling")]  # its sampler is fake


def test_a_sequence_alone_follows_the_oracle() -> None:
    assert generate(make_runner(), [104, 105], [5, 0, 31, 7], 12) == expected([104, 105], 12)


@given(st.lists(st.integers(0, 256), min_size=1, max_size=30), st.lists(st.integers(1, 9), min_size=1))
def test_chunk_borders_change_nothing(prompt: list[int], sizes: list[int]) -> None:
    runner = make_runner()
    table, at, ids = [9, 3, 4, 1, 30, 2, 8, 0, 11], 0, []
    for size in sizes * 30:
        chunk = prompt[at : at + size]
        is_last = at + len(chunk) == len(prompt)
        ids += step(runner, row(chunk, table, start=at, prompt=len(prompt), sampled=is_last))
        at += len(chunk)
        if is_last:
            break
    assert ids == expected(prompt, 1)


def test_a_batch_of_sequences_gives_each_what_it_gets_alone() -> None:
    runner = make_runner()
    prompts = [[1, 2, 3], [1, 2, 3, 4], [9] * 7, [0]]
    tables = [[i, i + 4, i + 8, i + 12] for i in range(4)]
    rows = [row(p, tables[i], seat=i, choice=i) for i, p in enumerate(prompts)]
    got = [[id] for id in step(runner, *rows)]
    for _ in range(6):
        rows = [
            row([PENDING_TOKEN], tables[i], start=len(p) + len(got[i]) - 1, prompt=len(p), seat=i, choice=i)
            for i, p in enumerate(prompts)
        ]
        for ids, id in zip(got, step(runner, *rows), strict=True):
            ids.append(id)
    assert got == [expected(p, 7, choice=i) for i, p in enumerate(prompts)]


def test_only_sampled_rows_answer_in_row_order() -> None:
    rows = [row([1], [0], seat=0), row([2, 3], [1], seat=1, prompt=5, sampled=False), row([4], [2], seat=2)]
    assert step(make_runner(), *rows) == expected([1], 1) + expected([4], 1)


def test_the_pending_token_is_what_the_seat_sampled_in_an_earlier_step() -> None:
    runner = make_runner()
    ids = expected([1, 2], 3)
    handles = [runner.launch([row([1, 2], [0, 1])])]
    handles += [runner.launch([row([-1], [0, 1], start=2 + i, prompt=2)]) for i in range(2)]
    assert [handle.wait() for handle in handles] == [[id] for id in ids]
    # Known ids before the pending one, as after a chunk of a resumed sequence.
    step(runner, row([3], [4], seat=1))
    chunk = [8, PENDING_TOKEN]
    assert step(runner, row(chunk, [5], seat=1, prompt=1)) == step(
        make_runner(), row([8, *expected([3], 1)], [5], prompt=1)
    )
    assert chunk == [8, PENDING_TOKEN]


def test_a_resume_or_recompute_in_one_chunk_goes_on_where_it_was() -> None:
    ids = expected([1, 2, 3], 9)
    assert step(make_runner(), row([1, 2, 3, *ids[:8]], [6, 5, 4], prompt=3)) == [ids[8]]


def test_shared_full_blocks_serve_two_sequences() -> None:
    runner = make_runner()
    step(runner, row([1, 2, 3, 4, 5], [0, 1]))
    assert step(runner, row([6, 7], [0, 2], start=4, prompt=6, seat=1)) == expected([1, 2, 3, 4, 6, 7], 1)


TABLE = [3, 1, 2]
PROMPT = [10, 11, 12, 13, 14, 15]


def after_fault(fault: Row | None, **changes: object) -> list[int]:
    """The third id, when `fault` runs as a step of its own before it or its row is changed."""
    runner = make_runner()
    known = generate(runner, PROMPT, TABLE, 2)
    if fault is not None:
        step(runner, fault)
    base: dict[str, object] = {"start": 7, "prompt": 6, "table": TABLE, "ids": known[-1:]}
    return step(runner, row(**(base | changes)))  # type: ignore[arg-type]


def test_without_a_fault_the_third_id_is_right() -> None:
    assert after_fault(None) == expected(PROMPT, 3)[2:]


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        (None, {"table": [3, 2, 1]}),  # a wrong block
        (None, {"table": [3, 3, 2]}),  # a block twice
        (None, {"start": 6}),  # a wrong slot, one too short
        (None, {"start": 8}),  # a hole
        (None, {"prompt": 5}),  # a wrong length
        (None, {"seed": 8}),
        (None, {"choice": 1}),
        (None, {"ids": [PENDING_TOKEN], "seat": 1}),  # another seat's token
        (row([99], TABLE, start=0, seat=1), {}),  # a neighbour writes into a block that is not its own
        (row([99, 99], [1], seat=1), {}),  # evicted and used again
        (row([99], TABLE, start=5, seat=0, prompt=6, sampled=False), {}),  # rewritten by itself
    ],
)
def test_a_wrong_block_slot_length_or_eviction_changes_the_id(fault: Row | None, changes: dict[str, object]) -> None:
    if changes.get("seat") == 1:
        fault = row([5], [9], seat=1)
    assert after_fault(fault, **changes) != expected(PROMPT, 3)[2:]


def test_rows_of_one_step_that_share_a_block_disturb_each_other() -> None:
    rows = [row([1, 2], [0], seat=0), row([3], [0], start=1, prompt=2, seat=1)]
    assert step(make_runner(), *rows) == expected([1, 3], 1) * 2


def test_a_position_never_written_is_not_a_zero() -> None:
    assert step(make_runner(), row([0], [0], start=1, prompt=2)) != expected([0, 0], 1)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (row([1], [32]), KeyError),
        (row([1], [-2]), KeyError),
        (row([1], [0, -2], start=3), None),
        (row([1], [0], start=4), IndexError),
        (row([1], [0], seat=4), KeyError),
        (row([1, -1, 2], [0]), Exception),
        (row([PENDING_TOKEN], [0]), OverflowError),
    ],
)
def test_what_a_device_cannot_reach_raises(bad: Row, error: type[Exception] | None) -> None:
    if error is None:
        # The scheduler appends to a table in flight: blocks behind the row are not read.
        assert len(step(make_runner(), bad)) == 1
        return
    with pytest.raises(error):
        step(make_runner(), bad)


def fold_whole(context: list[int], num_prompt_tokens: int, seed: int, choice: int) -> int:
    """The rule without a memo."""
    h = first("sim-1", context[:num_prompt_tokens], seed, choice)
    for id in context[num_prompt_tokens:]:
        h = following(h, id)
    return token(h, V)


table_of_eight = st.permutations(range(8)).map(lambda blocks: blocks[:4])
any_row = st.builds(
    lambda seat, start, ids, table, prompt, seed, sampled: Row(
        seat, start, ids, table, prompt, seed, seed % 2, sampled
    ),
    st.integers(0, 1),
    st.integers(0, 12),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.one_of(st.just([0, 1, 2, 3]), table_of_eight),
    st.integers(0, 5),
    st.integers(0, 1),
    st.booleans(),
)


@given(st.lists(st.lists(any_row, min_size=1, max_size=2), max_size=25))
def test_the_memo_never_changes_a_result(steps: list[list[Row]]) -> None:
    """Any rows at all, right or wrong, against a shadow cache that is hashed whole each time."""
    runner = make_runner()
    shadow = [0xFFFFFFFF] * (32 * 4)
    for rows in steps:
        for r in rows:
            for position, id in enumerate(r.token_ids, r.start):
                shadow[r.block_table[position // 4] * 4 + position % 4] = id
        right = []
        for r in rows:
            if r.is_sampled:
                context = [
                    shadow[r.block_table[position // 4] * 4 + position % 4]
                    for position in range(r.start + len(r.token_ids))
                ]
                right.append(fold_whole(context, r.num_prompt_tokens, r.seed, r.choice))
        assert step(runner, *rows) == right


def test_a_row_sampled_inside_its_prompt_leaves_no_memo() -> None:
    runner = make_runner()
    step(runner, row([1, 2], [0], prompt=4))
    assert step(runner, row([3, 4, 5], [0, 1], start=2, prompt=4)) == [fold_whole([1, 2, 3, 4, 5], 4, 7, 0)]


def test_decoding_folds_new_ids_only_and_a_change_folds_the_whole_context() -> None:
    runner = make_runner()
    generate(runner, PROMPT, TABLE, 5)
    assert runner.statistics().num_folded_whole == 1
    step(runner, row([1], TABLE, start=0, seat=1))
    assert runner.statistics().num_folded_whole == 2
    step(runner, row([PENDING_TOKEN], TABLE, start=10, prompt=6))
    assert runner.statistics().num_folded_whole == 3


def test_asynchronous_steps_queue_on_the_device() -> None:
    clock = HandClock()
    options = SimOptions(step_s=1.0, token_s=0.25, seat_s=0.5)
    runner = SimRunner(options, clock, clock.sleep)
    one = runner.launch([row([1, 2], [0])])
    two = runner.launch([row([PENDING_TOKEN], [0], start=2, prompt=2), row([4], [1], seat=1)])
    assert clock.now() == 100.0
    assert (one.ready_at, two.ready_at) == (102.0, 104.5)
    assert not one.poll()
    clock.at = 102.0
    assert (one.poll(), two.poll()) == (True, False)
    assert one.wait() == expected([1, 2], 1)
    assert clock.slept == []
    assert two.wait() == [expected([1, 2], 2)[1], *expected([4], 1)]
    assert (clock.slept, clock.now()) == ([2.5], 104.5)
    clock.at = 200.0
    assert runner.launch([row([1], [0])]).ready_at == 201.75
    assert runner.statistics().device_s == 6.25


def test_a_later_step_may_be_waited_for_first() -> None:
    clock = HandClock()
    runner = SimRunner(SimOptions(step_s=1.0), clock, clock.sleep)
    one, two = runner.launch([row([1], [0])]), runner.launch([row([2], [1])])
    assert two.wait() == expected([2], 1)
    assert one.poll()
    assert one.wait() == expected([1], 1)
    assert clock.slept == [2.0]


def test_synchronous_time_passes_inside_launch() -> None:
    clock = HandClock()
    runner = SimRunner(SimOptions(step_s=1.0, is_async=False), clock, clock.sleep)
    handle = runner.launch([row([1], [0])])
    assert (clock.now(), handle.poll()) == (101.0, True)
    assert handle.wait() == expected([1], 1)
    assert clock.slept == [1.0]


def test_a_step_is_waited_for_once() -> None:
    handle = make_runner().launch([row([1], [0])])
    handle.wait()
    with pytest.raises(RuntimeError, match="waited"):
        handle.wait()


@pytest.mark.parametrize("is_async", [True, False])
def test_warm_up_takes_its_time_and_leaves_no_trace(is_async: bool) -> None:
    clock = HandClock()
    options = SimOptions(step_s=1.0, token_s=0.5, num_blocks=3, block_size=4, max_num_seqs=2, is_async=is_async)
    runner = SimRunner(options, clock, clock.sleep)
    runner.warm(8)
    assert clock.now() == 100.0 + (1 + 0.5 * 8) + (1 + 0.5 * 2)
    assert runner.statistics() == SimRunner(options, clock, clock.sleep).statistics()
    assert step(runner, row([0], [0], start=1, prompt=2)) != expected([0, 0], 1)
    with pytest.raises(OverflowError):
        step(runner, row([PENDING_TOKEN], [0], seat=1))
    with pytest.raises(RuntimeError, match="first step"):
        runner.warm(8)


def test_warm_up_fits_a_cache_smaller_than_the_budget() -> None:
    make_runner(num_blocks=1).warm(4096)


def test_statistics_count_steps_rows_and_tokens() -> None:
    runner = make_runner()
    step(runner, row([1, 2, 3], [0], sampled=False, prompt=4), row([1], [1], seat=1))
    step(runner, row([4], [0], start=3, prompt=4))
    seen = runner.statistics()
    assert (seen.num_steps, seen.num_rows, seen.num_tokens, seen.num_folded_whole) == (2, 3, 5, 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"version": ""},
        {"version": "v" * 65},
        {"vocab_size": 0},
        {"vocab_size": 258},
        {"step_s": -1.0},
        {"step_s": float("nan")},
        {"token_s": float("inf")},
        {"seat_s": 1.5},
        {"num_blocks": 0},
        {"num_blocks": 65536, "block_size": 4096},
        {"block_size": 0},
        {"max_num_seqs": 4097},
        {"is_async": 1},
    ],
)
def test_options_out_of_bounds_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, SimOptions)


def oracle_for(prompt: Seq[int]) -> Oracle:
    return Oracle("sim-1", prompt, 7, 0, V)


@given(st.lists(st.integers(1, 9), max_size=30))
def test_the_oracle_takes_a_right_stream_in_any_pieces(sizes: list[int]) -> None:
    oracle, ids, at = oracle_for([1, 2]), expected([1, 2], 300), 0
    for size in sizes:
        oracle.check(ids[at : at + size])
        at += size
    assert oracle.num_checked == at


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ids: ids[:100] + ids[101:], r"output token 100: .* \(1 lost\)"),
        (lambda ids: ids[:100] + ids[107:], r"output token 100: .* \(7 lost\)"),
        (lambda ids: ids[:100] + ids[99:], r"output token 100: .* \(1 doubled\)"),
        (lambda ids: ids[:100] + ids[88:], r"output token 100: .* \(12 doubled\)"),
        (lambda ids: [*ids[:100], ids[101], ids[100], *ids[102:]], r"output token 100: .* \(reordered\)"),
        (lambda ids: ids[:100] + expected([9], 50), r"output token 100: .* \(wrong\)"),
        (lambda ids: [*ids[:100], 5000], r"output token 100: .*, got 5000 \(wrong\)"),
        (lambda ids: ids[1:], r"output token 0: .* \(1 lost\)"),
    ],
)
def test_the_oracle_names_the_first_fault(spoil, message: str) -> None:
    ids = expected([1, 2], 160)
    oracle = oracle_for([1, 2])
    with pytest.raises(ValueError, match=message):
        oracle.check(spoil(ids))
    oracle.check(ids[oracle.num_checked :])
    assert oracle.num_checked == 160


def test_a_sim_worker_needs_no_numpy_and_no_torch() -> None:
    code = (
        "import sys, engine.sim.model, engine.llm.detokenizer, engine.llm.runner\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
