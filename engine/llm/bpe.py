"""Owns byte-level BPE vocabularies: text to ids with special parsing off, ids to bytes.

Knows no model and no template. The merging is the `tokenizers` library's; only its set-up from a vocabulary is here.
Called by `worker/load.py`. Client text never yields a control token.
"""

from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from ipc.errors import Code, EngineError

GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(slots=True)
class Vocabulary:
    """What a model file says: tokens in byte-level spelling, merges best first, ids of control tokens, how to split."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    control_ids: frozenset[int]
    split: str
    eos_ids: frozenset[int]
    bos_id: int | None = None


def byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes with (Radford et al. 2019): printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by the name model files use. Raises KeyError for one that is not built."""
    gpt2 = pre_tokenizers.Split(Regex(GPT2_SPLIT), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt-2": pre_tokenizers.Sequence([gpt2, spell]),
        "default": pre_tokenizers.Sequence([gpt2, spell]),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2, spell]),
    }[split]


class BpeTokenizer:
    """Same use as ByteTokenizer. Safe from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises KeyError for a way of splitting that is not built."""
        ids = {token: id for id, token in enumerate(vocabulary.tokens)}
        self._tokenizer = Tokenizer(models.BPE(ids, vocabulary.merges, fuse_unk=False, byte_fallback=False))
        self._tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.split)
        self._tokens = vocabulary.tokens
        self._control_ids = vocabulary.control_ids
        self._letters = byte_letters()
        self._bytes: dict[int, bytes] = {}
        self.eos_ids = vocabulary.eos_ids
        self.bos_id = vocabulary.bos_id
        self.vocab_size = len(vocabulary.tokens)
        self.control_tokens = {vocabulary.tokens[id]: id for id in sorted(vocabulary.control_ids)}

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, no BOS. Raises EngineError `invalid` for lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EngineError(Code.INVALID, f"not Unicode text: {error.reason} at {error.start}", "prompt") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def check(self, ids: list[int]) -> None:
        """Raises EngineError `invalid` naming the first id that is not in the vocabulary."""
        for index, id in enumerate(ids):
            if not 0 <= id < self.vocab_size:
                message = f"token id {id} at {index} is not in the vocabulary of {self.vocab_size}"
                raise EngineError(Code.INVALID, message, "prompt")

    def token_bytes(self, id: int) -> bytes:
        """What an id adds to the text; control tokens and unknown ids add nothing."""
        known = self._bytes.get(id)
        if known is None:
            known = b""
            if 0 <= id < self.vocab_size and id not in self._control_ids:
                letters = self._letters
                token = self._tokens[id]
                if all(letter in letters for letter in token):
                    known = bytes(letters[letter] for letter in token)
                else:
                    known = token.encode()
            self._bytes[id] = known
        return known
