"""Owns the byte tokenizer: one id per UTF-8 byte, and one id that ends a text.

Knows no model and no request. The worker calls it once per prompt, the detokenizer once per id.
"""

from collections.abc import Sequence as Seq
from typing import Final, Protocol

from ipc.errors import Code, EngineError

EOS_ID: Final = 256
VOCAB_SIZE_MAX: Final = 257


class Tokenizer(Protocol):
    """What the worker needs of a vocabulary."""

    eos_ids: frozenset[int]
    vocab_size: int

    def encode(self, text: str, is_start: bool = True) -> list[int]:
        """Ids of a text, or of a segment that does not begin it. Raises EngineError."""
        ...

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of a whole prompt, with what this vocabulary puts before it; "" gives []. Raises EngineError."""
        ...

    def check(self, ids: list[int]) -> None:
        """Raises EngineError naming the first id outside the vocabulary."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """What an id adds to the text."""
        ...


class ByteTokenizer:
    """Ids 0..255 are bytes, id 256 ends the text (EOS). Text never yields EOS; an id list may hold it.

    `vocab_size` below 257 leaves the ids from there on out of the vocabulary: with 256 or less there is no
    EOS. Raises ValueError outside 1..257: a model must not sample ids that nobody can decode. Changes nothing
    after construction, so threads may share it.
    """

    __slots__ = ("_pieces", "eos_ids", "vocab_size")

    def __init__(self, vocab_size: int = VOCAB_SIZE_MAX) -> None:
        if not 1 <= vocab_size <= VOCAB_SIZE_MAX:
            raise ValueError(f"vocab_size is {vocab_size}; the byte tokenizer knows 1..{VOCAB_SIZE_MAX}")
        self.vocab_size = vocab_size
        self.eos_ids: frozenset[int] = frozenset((EOS_ID,)) if vocab_size > EOS_ID else frozenset()
        pieces = {byte: bytes((byte,)) for byte in range(EOS_ID)}
        pieces[EOS_ID] = b""
        self._pieces = {id: pieces[id] for id in range(vocab_size)}

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """As `encode`: nothing is put first, and no text means EOS."""
        return self.encode(text)

    def encode(self, text: str, is_start: bool = True) -> list[int]:
        """The ids of a text; "" gives []. Raises EngineError INVALID, field "prompt", for what has no
        UTF-8 form (a lone surrogate) or lies outside a vocabulary that was cut short.
        """
        try:
            ids = list(text.encode())
        except UnicodeEncodeError as error:
            lone = ord(text[error.start])
            raise EngineError(
                Code.INVALID, f"character {error.start} is the lone surrogate U+{lone:04X}", "prompt"
            ) from error
        if self.vocab_size < EOS_ID:
            self.check(ids)
        return ids

    def check(self, ids: Seq[int]) -> None:
        """Raise EngineError INVALID, field "prompt", naming the first id outside the vocabulary. []
        passes.
        """
        vocab_size = self.vocab_size
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return
        index, id = next((i, id) for i, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise EngineError(Code.INVALID, f"token {index} is {id}; ids are 0..{vocab_size - 1}", "prompt")

    def token_bytes(self, id: int) -> bytes:
        """The bytes one id stands for: b"" for EOS. An id outside the vocabulary is b"" too, so decoding
        never raises.
        """
        return self._pieces.get(id, b"")
