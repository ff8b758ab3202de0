"""Owns how a tokenizer is made: from the lists of a GGUF file, byte-level BPE or SentencePiece, or a tokenizer.json.

Knows no model and no file layout: lists, texts and settings in, a TextTokenizer out. Called by the loader of a worker.
Raises ValueError with the reason for whatever does not fit together or is not built.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.llm.text_tokenizer import Pieces, TextTokenizer

# Kinds of a GGUF file's tokens.
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6
SPACE: Final = "\u2581"  # how SentencePiece writes a space

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3: Final = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2: Final = _WORDS + r"\p{N}" + _REST
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the name that GGUF files use: the pattern, whether digits stand alone, whether a whole known word is not merged.
SPLITS: Final[dict[str, tuple[str, bool, bool]]] = {
    "gpt-2": (GPT2, False, False),
    "smollm": (GPT2, True, False),
    "llama-bpe": (LLAMA3, False, True),
    "qwen2": (QWEN2, False, False),
    "tekken": (TEKKEN, False, True),
}


@dataclass(slots=True)
class Lists:
    """What a GGUF file says of its vocabulary. `model` is gpt2 or llama; `split` names how text is cut for gpt2."""

    model: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    split: str
    eos_ids: frozenset[int]
    bos_id: int | None
    is_bos_added: bool
    has_space_prefix: bool = True


def byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes with (Radford et al. 2019): printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in plain}
    others = sorted(set(range(256)).difference(plain))
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _spelled(token: str, letters: dict[str, int]) -> bytes:
    """The bytes of a token in byte-level spelling; of one that is not, its own."""
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _piece(token: str) -> bytes:
    """The bytes of a SentencePiece token: <0xNN> is a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes((int(token[3:5], 16),))
    return token.replace(SPACE, " ").encode()


def from_lists(lists: Lists) -> TextTokenizer:
    """The tokenizer of a GGUF file."""
    tokens, kinds = lists.tokens, lists.kinds
    if len(kinds) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens and {len(kinds)} token types")
    ids = {token: id for id, token in enumerate(tokens)}
    if lists.model == "gpt2":
        library, letters = _byte_level(lists, ids), byte_letters()
        spell = {id: _spelled(token, letters) for id, token in enumerate(tokens)}
    elif lists.model == "llama":
        library = _sentence_piece(lists, ids)
        spell = {id: _piece(token) for id, token in enumerate(tokens)}
    else:
        raise ValueError(f"tokenizer {lists.model!r}; byte-level BPE ('gpt2') and SentencePiece ('llama') are built")
    library.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    )
    for id, kind in enumerate(kinds):
        if kind in {CONTROL, UNKNOWN, UNUSED}:
            spell[id] = b""
        elif kind == USER_DEFINED:
            spell[id] = tokens[id].replace(SPACE, " ").encode() if lists.model == "llama" else tokens[id].encode()
    control = {token: id for id, token in enumerate(tokens) if kinds[id] == CONTROL}
    for id in (*lists.eos_ids, *((lists.bos_id,) if lists.bos_id is not None else ())):
        if not 0 <= id < len(tokens):
            raise ValueError(f"token id {id} begins or ends a text, and there are {len(tokens)} tokens")
    names = {"eos_token": tokens[min(lists.eos_ids)]} if lists.eos_ids else {}
    if lists.bos_id is not None:
        names["bos_token"] = tokens[lists.bos_id]
    bos_id = lists.bos_id if lists.is_bos_added else None
    return TextTokenizer(library, Pieces(spell, control, lists.eos_ids, len(tokens), bos_id, names))


def _byte_level(lists: Lists, ids: dict[str, int]) -> Tokenizer:
    if lists.split not in SPLITS:
        raise ValueError(f"text splitting {lists.split!r} is not built")
    pattern, are_digits_alone, is_whole_word = SPLITS[lists.split]
    halves = [merge.partition(" ") for merge in lists.merges]
    merges = [(left, right) for left, _, right in halves]
    try:
        library = Tokenizer(models.BPE(ids, merges, fuse_unk=False, byte_fallback=False, ignore_merges=is_whole_word))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for merges outside the vocabulary
        raise ValueError(f"its merges do not fit its tokens: {error}") from None
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if are_digits_alone else []
    steps += [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    return library


def _sentence_piece(lists: Lists, ids: dict[str, int]) -> Tokenizer:
    """SentencePiece BPE (Kudo & Richardson 2018) as merges: of all ways to halve a piece, by falling score."""
    if len(lists.scores) != len(lists.tokens):
        raise ValueError(f"{len(lists.tokens)} tokens and {len(lists.scores)} scores")
    unknown = next((token for token, id in ids.items() if lists.kinds[id] == UNKNOWN), None)
    ways: list[tuple[float, int, int, str, str]] = []
    for id, token in enumerate(lists.tokens):
        if lists.kinds[id] not in {CONTROL, UNKNOWN, BYTE, UNUSED}:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    ways.append((-lists.scores[id], id, cut, left, right))
    ways.sort()
    merges = [(left, right) for _, _, _, left, right in ways]
    has_bytes = BYTE in lists.kinds
    library = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    replace = normalizers.Replace(" ", SPACE)
    library.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if lists.has_space_prefix else replace
    )
    strip = [decoders.Strip(" ", 1, 0)] if lists.has_space_prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return library


@dataclass(slots=True)
class Settings:
    """What stands beside a tokenizer.json. `is_bos_added` None: its own post-processor decides."""

    eos_ids: frozenset[int]
    bos_token: str = ""
    eos_token: str = ""
    is_bos_added: bool | None = None


def from_json(text: str, settings: Settings) -> TextTokenizer:
    """The tokenizer of a tokenizer.json (Hugging Face)."""
    try:
        tree = json.loads(text)
        library = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever it cannot read
        raise ValueError(f"is not a tokenizer: {error}") from None
    added = {int(each["id"]): each for each in tree.get("added_tokens") or []}
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    is_byte_level = "ByteLevel" in _types(tree.get("decoder"))
    if not is_byte_level and not {"ByteFallback", "Metaspace", "Replace"} & _types(tree.get("decoder")):
        raise ValueError("its decoder is neither byte-level nor SentencePiece")
    letters = byte_letters()
    spell, control = {}, {}
    for token, id in vocabulary.items():
        if id in added:
            is_control = bool(added[id].get("special"))
            spell[id] = b"" if is_control else token.encode()
            if is_control:
                control[token] = id
        else:
            spell[id] = _spelled(token, letters) if is_byte_level else _piece(token)
    eos_ids = settings.eos_ids
    if settings.eos_token in vocabulary:
        eos_ids |= {vocabulary[settings.eos_token]}
    vocab_size = max(vocabulary.values(), default=-1) + 1
    for id in eos_ids:
        if not 0 <= id < vocab_size:
            raise ValueError(f"token id {id} ends a text, and there are {vocab_size} tokens")
    bos_id = vocabulary.get(settings.bos_token)
    begins = library.encode("", add_special_tokens=True).ids[:1]
    is_added = begins == [bos_id] if settings.is_bos_added is None else settings.is_bos_added
    names = {"bos_token": settings.bos_token, "eos_token": settings.eos_token}
    pieces = Pieces(spell, control, eos_ids, vocab_size, bos_id if is_added else None, names)
    return TextTokenizer(library, pieces, _continuing(tree))


def _types(tree: Any) -> set[str]:
    """Every "type" in a part of a tokenizer.json."""
    if isinstance(tree, dict):
        found = {tree["type"]} if isinstance(tree.get("type"), str) else set()
        return found.union(*(_types(value) for value in tree.values()))
    return set().union(*(_types(value) for value in tree)) if isinstance(tree, list) else set()


def _continuing(tree: dict[str, Any]) -> Tokenizer | None:
    """A tokenizer for segments that do not begin the text, where the first one alone gets a space before it."""
    steps = tree.get("pre_tokenizer") or {}
    changed = False
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
            changed = True
    return Tokenizer.from_str(json.dumps(tree)) if changed else None
