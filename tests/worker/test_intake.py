"""Long texts are taken in beside the loop, and only so many questions wait there."""

import threading
from collections.abc import Iterator

import pytest

from engine.worker.intake import ASKS_MAX, LONG_TEXT, Intake
from engine.worker.loaded import Loaded
from ipc.errors import Code, EngineError
from ipc.messages import Ask, Tokenize
from tests.models_tiny import tokenizer
from tests.system.harness import until

LONG = Tokenize("ab " * LONG_TEXT)


@pytest.fixture
def intake() -> Iterator[Intake]:
    made = Intake(Loaded(None, tokenizer(), "v"), 100, 8)  # type: ignore[arg-type]
    yield made
    made._executor.shutdown()


def test_a_short_question_is_answered_at_once(intake: Intake):
    told = intake.ask(Ask(1, "a"), Tokenize("ab"))
    assert told is not None
    assert told.ids == tokenizer().encode("ab")
    assert len(intake) == 0


@pytest.mark.parametrize("asked", [LONG, Tokenize(ids=tokenizer().encode("ab") * LONG_TEXT)])
def test_a_long_one_does_not_hold_the_loop(intake: Intake, asked: Tokenize):
    assert intake.ask(Ask(1, "a"), asked) is None
    assert len(intake) == 1
    ((ask, answer),) = until(lambda: list(intake.answered()), 20.0)
    assert (ask, answer.result()) == (Ask(1, "a"), intake.tokenize(asked))
    assert (len(intake), list(intake.answered())) == (0, [])


def test_so_many_long_ones_wait(intake: Intake):
    go = threading.Event()
    intake._executor.submit(go.wait)
    for number in range(ASKS_MAX):
        assert intake.ask(Ask(1, str(number)), Tokenize("x" * LONG_TEXT)) is None
    with pytest.raises(EngineError) as caught:
        intake.ask(Ask(1, "more"), LONG)
    assert caught.value.code is Code.OVERLOADED
    assert intake.ask(Ask(1, "short"), Tokenize("ab")) is not None
    assert list(intake.answered()) == []
    go.set()
    seen: list[str] = []
    until(lambda: seen.extend(ask.request for ask, _ in intake.answered()) or len(seen) == ASKS_MAX, 20.0)
    assert seen == [str(number) for number in range(ASKS_MAX)]
