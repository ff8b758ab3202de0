"""A model file is read exactly or refused by name: truncated, missing, surplus, misshapen, contradictory, garbage."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.models.checkpoint import assemble
from engine.models.config import ModelError
from engine.models.decoder import Decoder
from engine.models.gguf import Gguf
from engine.models.gguf_checkpoint import GgufCheckpoint, unpermute
from tests.models_tiny import HIDDEN, shapes, tokens, weights, write


def load(path: Path) -> Decoder:
    return assemble(GgufCheckpoint(Gguf(path)), torch.device("cpu"), torch.float32, 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


def test_metadata_and_tensors_come_back(path: Path):
    file = Gguf(path)
    config = GgufCheckpoint(file).config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (2, 48, 3, 1)
    assert (config.head_size, config.vocab_size, config.is_tied, config.name) == (16, len(tokens()), True, "tiny")
    for name, expected in weights().items():
        assert np.array_equal(file.tensor(name, shapes()[name]), expected)


def test_quantized_and_half_precision_tensors(tmp_path: Path):
    wide = np.random.default_rng(1).normal(0, 1, (8, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("half", wide.astype(np.float16))
    packed = gguf.quants.quantize(wide, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("eight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = Gguf(tmp_path / "q.gguf")
    assert np.allclose(file.tensor("half", (8, 64)), wide, atol=2e-3)
    assert np.abs(file.tensor("eight", (8, 64)) - wide).max() < 0.02
    with pytest.raises(ModelError, match="shape"):
        file.tensor("half", (64, 8))


@pytest.mark.parametrize(
    "kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name), ids=lambda kind: kind.name
)
def test_every_type_that_the_package_dequantizes(tmp_path: Path, kind: gguf.GGMLQuantizationType):
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(7).integers(0, 256, (6, 4 * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("packed", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = (6, 4 * per_block)
    with np.errstate(all="ignore"):  # random scales may be anything
        got = Gguf(tmp_path / "q.gguf").tensor("packed", shape)
        expected = gguf.quants.dequantize(raw, kind).reshape(shape)
    assert got.dtype == np.float32
    assert np.array_equal(got, expected, equal_nan=True)


def test_a_type_without_a_formula_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("packed", np.zeros((1, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="type Q8_K is not dequantized here"):
        Gguf(tmp_path / "q.gguf").tensor("packed", (1, 256))


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rope scaling 'longrope'"),
        ({"rope.dimension_count": 8}, "part of a head"),
        ({"attention.value_length": 32}, "values of another size"),
        ({"expert_count": 8}, "mixtures of experts"),
        ({"context_length": "long"}, "context_length is not a number"),
        ({"context_length": 0}, "context is 0"),
    ],
)
def test_what_is_not_built_is_named(tmp_path: Path, metadata: dict, told: str):
    with pytest.raises(ModelError, match=told):
        load(write(tmp_path / "bad.gguf", **metadata))


def test_an_oversized_file_is_refused(path: Path):
    path.write_bytes(path.read_bytes() + b"x" * 100)
    with pytest.raises(ModelError, match=r"is oversized: 1\d\d bytes follow"):
        Gguf(path)


def test_more_tokens_than_rows_is_a_contradiction(tmp_path: Path):
    small = {"token_embd.weight": np.zeros((200, HIDDEN), np.float32)}
    with pytest.raises(ModelError, match="260 tokens, and 200 rows"):
        load(write(tmp_path / "bad.gguf", small))


def test_rope_rows_from_pairs_to_halves():
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert unpermute(rows, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changed", "metadata", "told"),
    [
        ({"blk.1.ffn_up.weight": None}, {}, "blk.1.ffn_up.weight is missing"),
        ({"blk.9.ffn_up.weight": np.zeros((2, 2), np.float32)}, {}, "nobody expects: blk.9.ffn_up.weight"),
        ({"output_norm.weight": np.zeros(HIDDEN + 1, np.float32)}, {}, "output_norm.weight has shape"),
        ({}, {"attention.head_count": 2}, "head size 24 is not a multiple of 16"),
        ({}, {"attention.head_count_kv": 2}, "3 heads do not divide into 2 KV heads"),
        ({}, {"block_count": 0}, "num_layers is 0"),
        ({}, {"block_count": None}, "llama.block_count is missing"),
        ({}, {"block_count": 3}, "blk.2.attn_norm.weight is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changed: dict, metadata: dict, told: str):
    path = write(tmp_path / "bad.gguf", changed, **metadata)
    with pytest.raises(ModelError, match=told):
        load(path)


def test_every_truncation_is_refused(path: Path):
    data = path.read_bytes()
    for size in [0, 1, 4, 8, 20, 100, len(data) // 2, len(data) - 64, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelError):
            Gguf(path)


def test_garbage_is_refused_and_never_crashes(path: Path):
    data = bytearray(path.read_bytes())
    dice = random.Random(4)
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(3):
            broken[dice.randrange(3000)] = dice.randrange(256)
        path.write_bytes(broken)
        try:
            load(path)
        except ModelError:
            continue
    path.write_bytes(b"not a model at all")
    with pytest.raises(ModelError, match="not a GGUF"):
        Gguf(path)
    with pytest.raises(ModelError, match="cannot be read"):
        Gguf(path.parent / "nowhere.gguf")
