"""Owns the use of a model's vocabulary: text to ids with special parsing off, ids to bytes.

Knows no model file and no template: `vocabulary.py` makes one from a GGUF file's lists or from a tokenizer.json. The
merging is the `tokenizers` library's. Client text never yields a control token.
"""

import re
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from ipc.errors import Code, EngineError


@dataclass(slots=True)
class Pieces:
    """A vocabulary: what each id adds to a text, the names of control tokens, and which ids begin and end a text.

    `bos_id` is set where a prompt begins with it. Ids from `vocab_size` on do not exist.
    """

    token_bytes: dict[int, bytes]
    control_tokens: dict[str, int]
    eos_ids: frozenset[int]
    vocab_size: int
    bos_id: int | None = None
    names: dict[str, str] = field(default_factory=dict)  # bos_token and eos_token, for templates


class TextTokenizer:
    """Same use as ByteTokenizer. Changes nothing after construction, so threads may share it."""

    def __init__(self, library: Tokenizer, pieces: Pieces, continuing: Tokenizer | None = None) -> None:
        """`continuing` encodes a segment that does not begin the text, where a vocabulary makes that difference."""
        self._library = library
        self._continuing = continuing or library
        for each in (library, self._continuing):
            each.encode_special_tokens = True  # names of control tokens in a text are text
        self._pieces = pieces
        self._bytes = pieces.token_bytes
        self.eos_ids = pieces.eos_ids
        self.bos_id = pieces.bos_id
        self.vocab_size = pieces.vocab_size
        self.control_tokens = pieces.control_tokens
        self.names = pieces.names
        names = sorted(pieces.control_tokens, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, names))) if names else None

    def encode(self, text: str, is_start: bool = True) -> list[int]:
        """Ids of a text, or of a segment of one; no BOS. Raises EngineError `invalid` for lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EngineError(Code.INVALID, f"not Unicode text: {error.reason} at {error.start}", "prompt") from None
        library = self._library if is_start else self._continuing
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """A prompt's ids, with the BOS that this vocabulary puts first; "" gives []. Raises EngineError `invalid`."""
        if not text:
            return []
        ids = self._encode_special(text) if parse_special else self.encode(text)
        if self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _encode_special(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for found in self._controls.finditer(text) if self._controls is not None else ():
            if at < found.start():
                ids += self.encode(text[at : found.start()], at == 0)
            ids.append(self.control_tokens[found[0]])
            at = found.end()
        return ids + self.encode(text[at:], at == 0) if at < len(text) else ids

    def check(self, ids: list[int]) -> None:
        """Raises EngineError `invalid` naming the first id that is not in the vocabulary."""
        for index, id in enumerate(ids):
            if not 0 <= id < self.vocab_size:
                message = f"token id {id} at {index} is not in the vocabulary of {self.vocab_size}"
                raise EngineError(Code.INVALID, message, "prompt")

    def token_bytes(self, id: int) -> bytes:
        """What an id adds to the text; control tokens and unknown ids add nothing."""
        return self._bytes.get(id, b"")

    def library_json(self) -> str:
        """The tokenizer.json of this vocabulary."""
        text: str = self._library.to_str()
        return text
