"""Thoughts and answers are told apart the same way however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.llm.reasoning import Reasoning


def split(parts: list[str], is_inside: bool = False) -> tuple[str, str]:
    reasoning = Reasoning(is_inside)
    pairs = [*map(reasoning.push, parts), reasoning.finish()]
    return "".join(thoughts for thoughts, _ in pairs), "".join(said for _, said in pairs)


@pytest.mark.parametrize(
    ("text", "is_inside", "expected"),
    [
        ("Paris.", False, ("", "Paris.")),
        ("  Paris. ", False, ("", "  Paris. ")),
        ("<think>France</think>Paris.", False, ("France", "Paris.")),
        ("\n<think>\nFrance? yes \n</think>\n\nParis.\n", False, ("France? yes", "Paris.\n")),
        ("France\n</think>\n\nParis.", True, ("France", "Paris.")),
        ("<think></think>x", False, ("", "x")),
        ("<think>\n\n</think>\n\nx", False, ("", "x")),
        ("<think>never ends < b ", False, ("never ends < b", "")),
        ("<think>a</thin", False, ("a</thin", "")),
        ("<thin", False, ("", "<thin")),
        ("a <think>b</think> c", False, ("", "a <think>b</think> c")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("x</think>y", False, ("", "x</think>y")),
        ("", True, ("", "")),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, is_inside: bool, expected: tuple[str, str]):
    assert split([text], is_inside) == expected
    assert split(list(text), is_inside) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "b c"]), max_size=12),
    st.lists(st.integers(0, 60), max_size=8),
    st.booleans(),
)
def test_the_cuts_do_not_matter(tokens: list[str], cuts: list[int], is_inside: bool):
    text = "".join(tokens)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert split(parts, is_inside) == split([text], is_inside)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", " ", "a"]), max_size=12), st.booleans())
def test_nothing_but_tags_and_white_space_is_lost(tokens: list[str], is_inside: bool):
    text = "".join(tokens)
    kept = "".join(split([text], is_inside))
    bare = text.replace("<think>", "").replace("</think>", "").replace(" ", "")
    assert kept.replace("<think>", "").replace("</think>", "").replace(" ", "") == bare


def test_what_is_certain_comes_at_once():
    reasoning = Reasoning()
    assert reasoning.push("<thin") == ("", "")
    assert reasoning.push("k>a") == ("a", "")
    assert reasoning.push(" ") == ("", "")
    assert reasoning.push("b</") == (" b", "")
    assert reasoning.push("i") == ("</i", "")
    assert reasoning.push("</think>c") == ("", "c")
    assert reasoning.push(" d") == ("", " d")
