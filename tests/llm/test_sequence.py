"""Every legal and every illegal move of a sequence."""

import itertools

import pytest

from engine.llm.sequence import TRANSITIONS, SequenceState, advance

LEGAL = {
    ("waiting", "running"),
    ("waiting", "finished"),
    ("running", "waiting"),
    ("running", "finished"),
}


@pytest.mark.parametrize(("state", "to"), list(itertools.product(SequenceState, SequenceState)))
def test_moves(state: SequenceState, to: SequenceState):
    if (state.value, to.value) in LEGAL:
        assert advance(state, to) is to
    else:
        with pytest.raises(ValueError, match="cannot go"):
            advance(state, to)


def test_the_table_names_every_state():
    assert set(TRANSITIONS) == set(SequenceState)
