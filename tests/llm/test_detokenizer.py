"""Incremental text against a slow reference that decodes everything at once after every id."""

from collections.abc import Sequence as Seq
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.llm.detokenizer import Detokenizer
from engine.llm.tokenizer import EOS_ID, ByteTokenizer


class PieceTokenizer:
    """A vocabulary of chosen pieces, and a count of how often one was asked for."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.num_asked = 0

    def token_bytes(self, id: int) -> bytes:
        self.num_asked += 1
        return self.pieces[id]


# Each incomplete character can be completed by one of these in a way that changes its decode.
CONTINUATIONS = [b"", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80"]


def decided(data: bytes) -> str:
    """The text that stays whatever comes next; a cut surrogate waits for its third byte, as in the codec."""
    if len(data) > 1 and data[-2] == 0xED and 0xA0 <= data[-1] <= 0xBF:
        data = data[:-1]
    texts = [(data + more).decode("utf-8", "replace") for more in CONTINUATIONS]
    return "".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def earliest(text: str, stop: Seq[str]) -> tuple[int, int, str] | None:
    return min(((text.find(s), -len(s), s) for s in stop if s in text), default=None)


def reference(pieces: Seq[bytes], stop: Seq[str], include_stop: bool) -> tuple[list[str], str, str | None, int | None]:
    """Text sent after each id, the whole text, the stop string and the index of the id that completed it."""
    sent: list[str] = []
    for n in range(1, len(pieces) + 1):
        text = decided(b"".join(pieces[:n]))
        if (found := earliest(text, stop)) is not None:
            start, _, string = found
            whole = text[: start + len(string)] if include_stop else text[:start]
            return [*sent, whole], whole, string, n - 1
        held = 0
        if not include_stop:
            held = max(k for k in range(len(text) + 1) if k == 0 or any(s[:k] == text[-k:] for s in stop))
        sent.append(text[: len(text) - held])
    text = b"".join(pieces).decode("utf-8", "replace")
    if (found := earliest(text, stop)) is not None:
        start, _, string = found
        return sent, text[: start + len(string)] if include_stop else text[:start], string, len(pieces) - 1
    return sent, text, None, None


def run(pieces: Seq[bytes], stop: tuple[str, ...], include_stop: bool, sizes: Seq[int]) -> None:
    """Push in groups of the given sizes (over and over) and compare after each push."""
    sent_after, whole, matched, stop_index = reference(pieces, stop, include_stop)
    detokenizer = Detokenizer(PieceTokenizer(*pieces), stop, include_stop)  # type: ignore[arg-type]
    text, at, turn = "", 0, 0
    while at < len(pieces):
        size = sizes[turn % len(sizes)]
        text += detokenizer.push(list(range(at, min(at + size, len(pieces)))))
        at, turn = min(at + size, len(pieces)), turn + 1
        assert text == sent_after[min(at, len(sent_after)) - 1]
    text += detokenizer.finish()
    assert text == whole
    assert detokenizer.matched == matched
    assert detokenizer.stop_index == stop_index
    assert detokenizer.is_stopped == (matched is not None)


awkward_bytes = st.sampled_from(
    [bytes((byte,)) for byte in b"abc \xc3\xa9\xe2\x82\xac\xf0\x9f\x91\x8b\xe0\xed\xa0\xf4\x90\xff\xc0\xef\xbf\xbd"]
)
any_piece = st.one_of(
    awkward_bytes,
    st.lists(awkward_bytes, max_size=4).map(b"".join),
    st.binary(max_size=3),
    st.text("abc👋é ", max_size=3).map(str.encode),
)
stop_string = st.text("abc é👋\ufffd", min_size=1, max_size=5)
group_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(st.lists(any_piece, max_size=30), group_sizes)
def test_joined_deltas_equal_one_decode_of_all_ids(pieces: list[bytes], sizes: list[int]) -> None:
    run(pieces, (), False, sizes)


@given(
    st.lists(any_piece, max_size=30),
    st.lists(stop_string, min_size=1, max_size=16).map(tuple),
    st.booleans(),
    group_sizes,
)
def test_stop_strings_agree_with_the_reference_for_any_grouping(
    pieces: list[bytes], stop: tuple[str, ...], include_stop: bool, sizes: list[int]
) -> None:
    run(pieces, stop, include_stop, sizes)


@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"aab"]), max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=5).map(tuple),
    st.booleans(),
    group_sizes,
)
def test_self_overlapping_stop_strings_agree_with_the_reference(
    pieces: list[bytes], stop: tuple[str, ...], include_stop: bool, sizes: list[int]
) -> None:
    run(pieces, stop, include_stop, sizes)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_a_rebuilt_detokenizer_goes_on_as_the_first_would_have(data: bytes, at: int) -> None:
    tokenizer, stop = ByteTokenizer(), ("ab", "\ufffdz")
    first = Detokenizer(tokenizer, stop)
    for byte in data[:at]:
        first.push([byte])
    again = Detokenizer(tokenizer, stop)
    again.push(data[:at])
    assert [first.push(data[at:]), first.finish()] == [again.push(data[at:]), again.finish()]
    assert (first.stop_index, first.matched) == (again.stop_index, again.matched)


def push_bytes(data: bytes, stop: tuple[str, ...] = (), include_stop: bool = False) -> list[str]:
    detokenizer = Detokenizer(ByteTokenizer(), stop, include_stop)
    return [detokenizer.push([byte]) for byte in data] + [detokenizer.finish()]


def test_an_emoji_over_several_tokens_comes_once_and_whole() -> None:
    """waybarrios/vllm-mlx#109, exo-explore/exo#1691, abetlen/llama-cpp-python#309."""
    assert push_bytes("é👋客".encode()) == ["", "é", "", "", "", "👋", "", "", "客", ""]


@pytest.mark.parametrize("size", range(1, 9))
def test_two_emoji_in_eight_tokens_for_every_group_size(size: int) -> None:
    """ai-dynamo/dynamo#12688: a look-back that restarts inside a character loses or doubles one."""
    run([bytes((byte,)) for byte in "🔥👋".encode()], (), False, [size])


def test_a_token_that_begins_with_a_space_does_not_flush_good_bytes() -> None:
    """Blaizzy/mlx-vlm#1778."""
    tokenizer = PieceTokenizer(b"\xf0\x9f", b" \xf0\x9f", b"\x91", b"\x8b")
    detokenizer = Detokenizer(tokenizer)  # type: ignore[arg-type]
    assert [detokenizer.push([id]) for id in range(4)] == ["", "\ufffd ", "", "👋"]
    assert detokenizer.finish() == ""


def test_a_cut_emoji_at_the_end_is_one_replacement_character() -> None:
    """timtoole02/Camelid#288: a strict decode raised."""
    assert push_bytes(b"a\xf0\x9f\x91") == ["a", "", "", "", "\ufffd"]


def test_spaces_and_punctuation_stay_as_they_are() -> None:
    """ml-explore/mlx-lm#1754, huggingface/transformers#32575."""
    assert "".join(push_bytes(b"  Hello , ' ' world . ")) == "  Hello , ' ' world . "


def test_an_end_of_text_id_adds_nothing_and_completes_nothing() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push([0x61, EOS_ID, 0xC3]) == "a"
    assert detokenizer.push([EOS_ID, 0xA9]) == "é"


def test_each_id_is_looked_at_once_in_four_thousand() -> None:
    """drumih/turbo-fieldfare#118: everything was decoded again at each step."""
    for stop in ((), ("never said",)):
        tokenizer = PieceTokenizer(b" fox", "👋".encode(), b"\xf0\x9f")
        detokenizer = Detokenizer(tokenizer, stop)  # type: ignore[arg-type]
        text = "".join(detokenizer.push([i % 3]) for i in range(4000)) + detokenizer.finish()
        assert tokenizer.num_asked == 4000
        assert text == b"".join(tokenizer.pieces[i % 3] for i in range(4000)).decode("utf-8", "replace")


def test_a_stop_string_over_two_tokens_is_found_and_its_first_half_never_sent() -> None:
    """vllm-project/vllm#3574, SharpAI/SwiftLM#132: " fox fox …" with stop "fox f"."""
    detokenizer = Detokenizer(PieceTokenizer(b" fox"), ("fox f",))  # type: ignore[arg-type]
    assert detokenizer.push([0]) == " "
    assert detokenizer.push([0, 0, 0]) == ""
    assert (detokenizer.matched, detokenizer.stop_index) == ("fox f", 1)
    assert (detokenizer.push([0]), detokenizer.finish()) == ("", "")


def test_only_a_true_beginning_of_a_stop_string_is_held_back() -> None:
    """smg-project/smg#2203: the longest stop length was always held back."""
    assert push_bytes(b"abzzc", ("z" * 20,)) == ["a", "b", "", "", "zzc", ""]


def test_text_held_as_a_possible_stop_string_is_delivered_at_the_end() -> None:
    """LostRuins/koboldcpp#1031: it was thrown away."""
    assert push_bytes(b" fox", ("fox!",)) == [" ", "", "", "", "fox"]


def test_the_first_id_that_completes_a_stop_string_ends_the_text() -> None:
    assert push_bytes(b"xabcd", ("abc", "ab")) == ["x", "", "", "", "", ""]
    # "abc" would start earlier, but "b" is complete one id before it.
    detokenizer = Detokenizer(ByteTokenizer(), ("abc", "b"))
    assert detokenizer.push(b"xabc") == "xa"
    assert (detokenizer.matched, detokenizer.stop_index) == ("b", 2)


@pytest.mark.parametrize("stop", [("ab", "abc", "c"), ("c", "abc", "ab")])
def test_of_several_in_one_id_the_earliest_counts_then_the_longest(stop: tuple[str, ...]) -> None:
    detokenizer = Detokenizer(PieceTokenizer(b"xabcd"), stop)  # type: ignore[arg-type]
    assert detokenizer.push([0]) == "x"
    assert (detokenizer.matched, detokenizer.stop_index) == ("abc", 0)


def test_ids_behind_the_stop_in_one_push_are_not_output() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ("\n\n",))
    assert detokenizer.push(b"one") == "one"
    assert detokenizer.push(b" two\n\nthree\n\n") == " two"
    assert detokenizer.stop_index == 8
    assert detokenizer.is_stopped


def test_a_stop_string_over_a_replacement_character() -> None:
    assert push_bytes(b"x\xf0\x9fyz", ("\ufffdy",)) == ["x", "", "", "", "", ""]
    # The first byte behind the broken character decides two characters at once.
    detokenizer = Detokenizer(ByteTokenizer(), ("\ufffd",))
    assert detokenizer.push(b"x\xf0\x9fyz") == "x"
    assert detokenizer.stop_index == 3


def test_a_character_cut_by_the_end_may_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ("a\ufffd",))
    assert detokenizer.push(b"xa\xf0\x9f") == "x"
    assert not detokenizer.is_stopped
    assert detokenizer.finish() == ""
    assert (detokenizer.matched, detokenizer.stop_index) == ("a\ufffd", 3)


def test_include_stop_holds_nothing_back_and_ends_behind_the_stop_string() -> None:
    """vllm-project/vllm#57052."""
    assert push_bytes(b"xabcd", ("abc",), include_stop=True) == ["x", "a", "b", "c", "", ""]
    detokenizer = Detokenizer(PieceTokenizer(b"xab", b"cd"), ("abc",), True)  # type: ignore[arg-type]
    assert [detokenizer.push([0]), detokenizer.push([1])] == ["xab", "c"]


def test_a_held_end_that_fails_still_yields_the_stop_string_inside_it() -> None:
    assert push_bytes(b"aaab", ("aab",)) == ["", "", "a", "", ""]
