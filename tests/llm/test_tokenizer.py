"""The byte tokenizer: its ids, its limits and what it refuses."""

import pytest

from engine.llm.tokenizer import ByteTokenizer
from ipc.errors import Code, EngineError


def test_ids_are_the_bytes_of_the_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé👋") == [0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x91, 0x8B]
    assert tokenizer.encode("") == []
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("ďa 客 한국\x00"))) == "ďa 客 한국\x00".encode()


def test_vocabulary_is_the_bytes_and_one_end_of_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_ids == {256}
    assert [tokenizer.token_bytes(id) for id in (0, 255, 256)] == [b"\x00", b"\xff", b""]


@pytest.mark.parametrize("size", [1, 64, 256])
def test_a_smaller_vocabulary_has_no_end_of_text(size: int) -> None:
    tokenizer = ByteTokenizer(size)
    assert tokenizer.vocab_size == size
    assert tokenizer.eos_ids == frozenset()
    tokenizer.check([size - 1])
    with pytest.raises(EngineError):
        tokenizer.check([size])


def test_a_vocabulary_nobody_can_decode_is_refused() -> None:
    for size in (-1, 0, 258):
        with pytest.raises(ValueError, match="vocab_size"):
            ByteTokenizer(size)


@pytest.mark.parametrize(
    ("ids", "index", "id"),
    [([257], 0, 257), ([1, -1], 1, -1), ([1, 2, 2**62, -5], 2, 2**62), ([-(2**70)], 0, -(2**70))],
)
def test_an_id_out_of_range_is_invalid_and_named(ids: list[int], index: int, id: int) -> None:
    """vllm-project/vllm#26797, #9634: such an id reached the device as an index."""
    with pytest.raises(EngineError) as raised:
        ByteTokenizer().check(ids)
    assert (raised.value.code, raised.value.field) == (Code.INVALID, "prompt")
    assert f"token {index} is {id};" in raised.value.message


def test_every_id_of_the_vocabulary_passes() -> None:
    ByteTokenizer().check(range(257))
    ByteTokenizer().check([])


def test_decoding_an_unknown_id_never_raises() -> None:
    """vllm-project/vllm#13175."""
    assert [ByteTokenizer().token_bytes(id) for id in (-1, 257, 2**62)] == [b"", b"", b""]
    assert ByteTokenizer(64).token_bytes(64) == b""


def test_a_lone_surrogate_is_invalid_not_a_crash() -> None:
    with pytest.raises(EngineError) as raised:
        ByteTokenizer().encode("ab\ud83dc")
    assert (raised.value.code, raised.value.field) == (Code.INVALID, "prompt")
    assert raised.value.message == "character 2 is the lone surrogate U+D83D"


def test_text_outside_a_cut_vocabulary_is_invalid() -> None:
    assert ByteTokenizer(64).encode("123") == [0x31, 0x32, 0x33]
    with pytest.raises(EngineError) as raised:
        ByteTokenizer(64).encode("1a")
    assert (raised.value.code, raised.value.field) == (Code.INVALID, "prompt")


def test_text_never_yields_a_control_token() -> None:
    assert max(ByteTokenizer().encode("<eos>\xff" + chr(256) + chr(0x10FFFF))) < 256
