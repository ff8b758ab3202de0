"""Owns the split of an answer's text into what the model thinks and what it says, by the tags around its thoughts.

Pure: pushed texts go in, two texts come out, and the same two for every way of cutting the input. Knows no token.
Called by the worker for each answer to a conversation.
"""

from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class Reasoning:
    """Splits one answer. `is_inside` says whether it begins within thoughts, as after a template that opened the tag.

    An answer that begins with neither the tag nor thoughts is said, all of it: a later tag is text like any other.
    White space around thoughts, and before what is said after them, is left out.
    """

    __slots__ = ("_held", "_is_fresh", "_is_said", "is_inside")

    def __init__(self, is_inside: bool = False) -> None:
        self.is_inside = is_inside
        self._is_said = False  # thoughts are over, or never came
        self._is_fresh = True  # nothing of the present part has come out
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain by now of (thoughts, what is said)."""
        thoughts = ""
        self._held += text
        if not self._is_said and not self.is_inside:
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._held, self.is_inside = begun[len(OPEN) :], True
            elif OPEN.startswith(begun):
                return "", ""  # the tag, perhaps
            else:
                self._is_said, self._is_fresh = True, False
        if self.is_inside:
            before, tag, after = self._held.partition(CLOSE)
            if tag:
                self._held, self.is_inside, self._is_said = after, False, True
                thoughts = self._thoughts(before.rstrip())
                self._is_fresh = True
            else:
                keep = _tail(before)
                self._held = before[len(before) - keep :]
                return self._thoughts(before[: len(before) - keep]), ""
        said, self._held = self._held, ""
        if self._is_fresh:
            said = said.lstrip()
            self._is_fresh = not said
        return thoughts, said

    def _thoughts(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text

    def finish(self) -> tuple[str, str]:
        """The answer is over: what was still held back."""
        held, self._held = self._held, ""
        if self.is_inside:
            return self._thoughts(held.rstrip()), ""
        return "", held


def _tail(text: str) -> int:
    """How many of its last characters could be white space before a closing tag, or the beginning of one."""
    for size in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if CLOSE.startswith(text[-size:]):
            return len(text) - len(text[: len(text) - size].rstrip())
    return len(text) - len(text.rstrip())
