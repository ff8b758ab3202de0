"""Vocabularies: SentencePiece against its own library, tokenizer.json against the list form, threads, what is added."""

import io
import json
import threading

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from engine.llm.detokenizer import Detokenizer
from engine.llm.template import ChatTemplate
from engine.llm.text_tokenizer import TextTokenizer
from engine.llm.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Lists, Settings, from_json, from_lists
from ipc.errors import EngineError
from tests.models_tiny import MERGES, SPECIALS, TEMPLATE, tokenizer, tokenizer_json, tokens

TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog jumps over the quick brown fox again "
    "once upon a time there was a small engine that could not stop and it said hello hello world "
) * 20


@pytest.fixture(scope="module")
def piece() -> sentencepiece.SentencePieceProcessor:
    """A real SentencePiece model, trained here in a moment."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split(" and ")),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def lists(piece: sentencepiece.SentencePieceProcessor, **changes: object) -> Lists:
    """What a GGUF file would say of it."""
    count = piece.get_piece_size()
    kinds = [
        UNKNOWN if piece.is_unknown(id) else CONTROL if piece.is_control(id) else BYTE if piece.is_byte(id) else 1
        for id in range(count)
    ]
    fields = {
        "model": "llama",
        "tokens": [piece.id_to_piece(id) for id in range(count)],
        "kinds": kinds,
        "merges": [],
        "scores": [piece.get_score(id) for id in range(count)],
        "split": "",
        "eos_ids": frozenset({piece.eos_id()}),
        "bos_id": piece.bos_id(),
        "is_bos_added": True,
    } | changes
    return Lists(**fields)


def text_of(vocabulary: TextTokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(vocabulary)
    return "".join(detokenizer.push([id]) for id in ids) + detokenizer.finish()


SENTENCES = [
    "the quick brown fox",
    "  two  spaces\tand a tab\n",
    "2024-12-31 x=100000",
    "你好 한국 👋🔥 ďa",
    "zebra quiz",
    "hello<s>world</s>",
    "▁already",
    " ",
]


@pytest.mark.parametrize("text", SENTENCES)
def test_sentence_piece_ids_are_those_of_its_own_library(piece: sentencepiece.SentencePieceProcessor, text: str):
    made = from_lists(lists(piece))
    expected = piece.encode(text)
    if "<s>" not in text:  # as text, not as the control token: the library's own encode does the same
        assert made.encode(text) == expected
    assert made.bos_id not in made.encode(text)
    assert text_of(made, made.encode(text)) == f" {text}".replace("▁", " ")


@given(text=st.text(alphabet="the quickbrowndogn 12é你👋\n", max_size=60))
def test_sentence_piece_on_any_text(piece: sentencepiece.SentencePieceProcessor, text: str):
    made = from_lists(lists(piece))
    if text:
        assert made.encode(text) == piece.encode(text)
        assert made.encode_prompt(text) == [piece.bos_id(), *piece.encode(text)]


def test_spaces_and_bytes_of_sentence_piece_survive(piece: sentencepiece.SentencePieceProcessor):
    """Text is what the ids add to a text that is there already: the space before a word is never stripped (mlx-lm#1754,
    transformers#25758), none before punctuation (transformers#32575), and a character cut in bytes comes out whole
    however the bytes arrive (dynamo#12688)."""
    made = from_lists(lists(piece))
    hello = made.encode("hello")
    assert text_of(made, hello + hello) == " hello hello"
    assert text_of(made, made.encode("a . b , ' '")) == " a . b , ' '"
    flags = "🇨🇿🇰🇷".encode()
    ids = [piece.piece_to_id(f"<0x{byte:02X}>") for byte in flags]
    for size in range(1, 9):
        detokenizer = Detokenizer(made)
        parts = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join([*parts, detokenizer.finish()]) == "🇨🇿🇰🇷"
    assert text_of(made, [*ids[:3], *hello]) == "\ufffd hello"


def test_a_vocabulary_without_space_prefix(piece: sentencepiece.SentencePieceProcessor):
    made = from_lists(lists(piece, has_space_prefix=False))
    assert text_of(made, made.encode("hello")) == "hello"


def test_one_bos_whoever_writes_it():
    """vllm#27515: a template that writes BOS, and a vocabulary that adds it to prompts."""
    made = tokenizer(is_bos_added=True)
    template = ChatTemplate("{{ bos_token }}" + TEMPLATE, made.control_tokens, made.names)
    ids, _ = template.ids([{"role": "user", "content": "hi"}], made.encode)
    assert ids == [1, 1, *made.encode("user\nhi"), 0, 1, *made.encode("assistant\n")]  # as the template says, no more
    plain, _ = ChatTemplate(TEMPLATE, made.control_tokens, made.names).ids(
        [{"role": "user", "content": "hi"}], made.encode
    )
    assert plain == ids[1:]
    assert made.encode_prompt("hi") == [1, *made.encode("hi")]
    assert made.encode_prompt("<|start|>hi", parse_special=True) == [1, *made.encode("hi")]
    assert made.encode_prompt("") == []
    assert tokenizer().encode_prompt("<|start|>hi<|end|>", parse_special=True) == [1, *made.encode("hi"), 0]


def test_user_defined_tokens_are_whole_and_are_text():
    names = [*tokens(), "<think>"]
    kinds = [CONTROL if name in SPECIALS else USER_DEFINED if name == "<think>" else 1 for name in names]
    made = from_lists(Lists("gpt2", names, kinds, MERGES, [], "gpt-2", frozenset({0}), None, False))
    assert made.encode("a<think>b") == [*made.encode("a"), 260, *made.encode("b")]
    assert text_of(made, made.encode("a<think>b")) == "a<think>b"


@pytest.mark.parametrize("text", [*SENTENCES, *SPECIALS, "ab ab", ""])
def test_a_tokenizer_json_equals_the_lists_it_was_made_of(text: str):
    told = Settings(frozenset({0}), SPECIALS[1], SPECIALS[0])
    made, expected = from_json(tokenizer_json(), told), tokenizer()
    assert made.encode(text) == expected.encode(text)
    assert text_of(made, made.encode(text)) == text
    assert made.control_tokens == expected.control_tokens
    assert (made.eos_ids, made.vocab_size, made.bos_id) == ({0}, 260, None)


def test_a_tokenizer_json_that_adds_bos():
    tree = json.loads(tokenizer_json())
    bos = {"SpecialToken": {"id": SPECIALS[1], "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {SPECIALS[1]: {"id": SPECIALS[1], "ids": [1], "tokens": [SPECIALS[1]]}},
    }
    text = json.dumps(tree)
    assert from_json(text, Settings(frozenset({0}), SPECIALS[1])).bos_id == 1
    assert from_json(text, Settings(frozenset({0}), SPECIALS[1], "", False)).bos_id is None
    assert from_json(tokenizer_json(), Settings(frozenset({0}), SPECIALS[1], "", True)).bos_id == 1


def test_a_space_before_the_first_segment_alone(piece: sentencepiece.SentencePieceProcessor):
    """Newer folders put the space in the pre-tokenizer: before a text's beginning and not after a control token."""
    tree = json.loads(from_lists(lists(piece)).library_json())
    tree["normalizer"] = None
    tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    made = from_json(json.dumps(tree), Settings(frozenset({2})))
    assert text_of(made, made.encode("hello")) == " hello"
    assert text_of(made, made.encode("hello", False)) == "hello"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kinds": [1]}, "tokens and 1 token types"),
        ({"model": "bert"}, "tokenizer 'bert'"),
        ({"split": "klingon"}, "text splitting 'klingon'"),
        ({"merges": ["a b", "zz zz"]}, "merges do not fit"),
        ({"merges": ["ab"]}, "merges do not fit"),
        ({"eos_ids": frozenset({260})}, "token id 260"),
        ({"bos_id": -1}, "token id -1"),
        ({"model": "llama"}, "260 tokens and 0 scores"),
    ],
)
def test_lists_that_do_not_fit_are_refused(changes: dict, told: str):
    fields = {
        "model": "gpt2",
        "tokens": tokens(),
        "kinds": [1] * 260,
        "merges": MERGES,
        "scores": [],
        "split": "smollm",
        "eos_ids": frozenset({0}),
        "bos_id": 1,
        "is_bos_added": False,
    } | changes
    with pytest.raises(ValueError, match=told):
        from_lists(Lists(**fields))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "is not a tokenizer"),
        ("nonsense", "is not a tokenizer"),
        (json.dumps({**json.loads(tokenizer_json()), "decoder": None}), "neither byte-level nor SentencePiece"),
    ],
)
def test_a_tokenizer_json_that_cannot_be_used(text: str, told: str):
    with pytest.raises(ValueError, match=told):
        from_json(text, Settings(frozenset({0})))


def test_many_threads_use_one_tokenizer():
    """tokenizers#537: "already borrowed" when one object is used and changed by many; nobody changes this one."""
    made, failed = tokenizer(), []
    template = ChatTemplate(TEMPLATE, made.control_tokens, made.names)
    expected = {size: made.encode("ab 12 你好 " * size) for size in range(1, 20)}

    def work(number: int) -> None:
        try:
            for turn in range(80):
                size = (number + turn) % 19 + 1
                assert made.encode("ab 12 你好 " * size) == expected[size]
                template.ids([{"role": "user", "content": "x" * size}], made.encode)
                assert made.encode_prompt("<|start|>x", parse_special=True)[0] == 1
        except Exception as error:  # noqa: BLE001 - told below, by the thread that can fail the test
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_unknown_ids_decode_to_nothing():
    made = tokenizer()
    assert made.token_bytes(10**9) == b""
    assert made.token_bytes(-1) == b""
    with pytest.raises(EngineError, match="token id 260 at 1"):
        made.check([1, 260])
