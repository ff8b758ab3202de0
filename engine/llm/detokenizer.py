"""Owns the text of one choice of one request: ids in, text out, cut at the first stop string.

Knows no message and no finish reason. The worker's loop holds one per sequence and feeds it what a step
committed; after a resume it is built again by pushing the ids the client already has and dropping what that
returns.
"""

from codecs import utf_8_decode
from collections.abc import Sequence as Seq

from engine.llm.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into text as they come. Joined, what `push` and `finish` return is one decode of all ids with
    "replace" (one U+FFFD per maximal ill-formed subpart), up to a stop string.

    The rule: the first id after which the decoded text holds a stop string ends the text. If it then holds
    several, the one that starts first counts; of those that start together, the longest. Bytes that the
    codec still sees as the beginning of a character are not text yet. So what was sent after n ids depends on
    those ids and on `stop`, never on how they were grouped.

    `stop` holds non-empty strings (checked where the request is decoded). With `include_stop` the text ends
    behind the stop string, else before it. Text of the first `min_ids` ids is no part of a stop string.
    """

    __slots__ = (
        "_first_characters",
        "_held",
        "_include_stop",
        "_min_ids",
        "_num_ids",
        "_pending",
        "_stop",
        "_token_bytes",
        "is_stopped",
        "matched",
        "stop_index",
    )

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False, min_ids: int = 0
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._stop = stop
        self._first_characters = frozenset(string[0] for string in stop)
        self._include_stop = include_stop
        self._min_ids = min_ids
        # Bytes of a character that is not complete: three at most, so no push decodes anything twice but
        # these.
        self._pending = b""
        # The longest end of the text that could begin a stop string. Every later match starts in it or behind
        # it. With include_stop it has been sent already: whatever it turns out to be, it stays.
        self._held = ""
        self._num_ids = 0
        self.is_stopped = False
        # The stop string found, and the index (from 0, over all ids ever pushed) of the id that completed it:
        # ids behind that one are not output.
        self.matched: str | None = None
        self.stop_index: int | None = None

    def push(self, ids: Seq[int]) -> str:
        """Take the next ids; return the text to send now, often "". Changes the state; ignores ids after a
        stop.
        """
        if self._stop:
            return self._push_watched(ids)
        if len(ids) == 1:
            data = self._pending + self._token_bytes(ids[0])
        else:
            data = self._pending + b"".join(map(self._token_bytes, ids))
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """No more ids: return the rest of the text. A cut character becomes U+FFFD, which may complete a
        stop string (then `is_stopped` is set here); a text held back as a possible stop string is
        delivered. Call it once, last.
        """
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        if text and self._stop:
            text = self._watch(text)
        if not self._include_stop:
            text += self._held
        self._held = ""
        return text

    def _push_watched(self, ids: Seq[int]) -> str:
        # Id by id, because the rule is about the first id that completes a stop string.
        sent: list[str] = []
        for id in ids:
            if self.is_stopped:
                break
            self._num_ids += 1
            data = self._pending + self._token_bytes(id)
            text, used = utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            if text:
                sent.append(self._watch(text) if self._num_ids > self._min_ids else text)
        return "".join(sent)

    def _watch(self, new: str) -> str:
        """Look for a stop string in what is held and `new`; return what may be sent."""
        held = self._held
        if not held and self._first_characters.isdisjoint(new):
            return new
        text = held + new
        found = [(at, -len(string), string) for string in self._stop if (at := text.find(string)) >= 0]
        if found:
            return self._cut(text, min(found))
        # Each start that fails is dropped for good, so this costs one try per character in the long run.
        start = 0
        while start < len(text) and not self._can_begin_stop(text[start:]):
            start += 1
        self._held = text[start:]
        return new if self._include_stop else text[:start]

    def _cut(self, text: str, found: tuple[int, int, str]) -> str:
        start, _, string = found
        num_held = len(self._held)
        self.is_stopped = True
        self.matched = string
        self.stop_index = self._num_ids - 1
        self._held = ""
        self._pending = b""
        # A match inside what was held would have been found before: it always ends in the new text.
        return text[num_held : start + len(string)] if self._include_stop else text[:start]

    def _can_begin_stop(self, tail: str) -> bool:
        return any(string.startswith(tail) for string in self._stop)
