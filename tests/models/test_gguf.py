"""A model file is read exactly or refused by name: truncated, missing, surplus, misshapen, contradictory, garbage."""

import random
from pathlib import Path

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
    import gguf

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
