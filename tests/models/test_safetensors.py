"""A Hugging Face folder is read exactly or refused by name: what is missing, stray, broken, contradictory or code."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.attention.reference import Span, plan
from engine.config import Deployment, Llm
from engine.models.checkpoint import Checkpoint, assemble
from engine.models.config import ModelError
from engine.models.decoder import Decoder
from engine.models.gguf import Gguf
from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.safetensors import Folder
from engine.worker.load_llm import load_llm, open_model, version
from ipc.errors import EngineError
from tests.models_tiny import HIDDEN, LAYERS, SPECIALS, hf_weights, tokenizer_json, tokens, write, write_folder

HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"


def decoder(checkpoint: Checkpoint, max_len: int = 64) -> Decoder:
    made = assemble(checkpoint, torch.device("cpu"), torch.float32, max_len)
    made.make_cache(max_len, torch.float32)
    return made


def logits(made: Decoder, ids: list[int]) -> torch.Tensor:
    """Of every position, in one step."""
    positions = torch.arange(len(ids))
    planned = plan([Span(0, len(ids), 0, range(len(ids)))], 1, made.zero_slot, made.heads_per_kv, made.device)
    return made.logits(made.forward(torch.tensor(ids), positions, positions, planned, positions))


def load(path: Path, **llm: object) -> None:
    load_llm(Deployment("tiny", str(path), llm=Llm(max_model_len=64, max_num_seqs=2, **llm)), "", lambda _: None)


IDS = [3, 50, 100, 7, 9, 200, 20, 21]


def test_gguf_and_safetensors_of_the_same_weights_agree_bit_for_bit(tmp_path: Path):
    gguf = decoder(GgufCheckpoint(Gguf(write(tmp_path / "tiny.gguf"))))
    for shards in (0, 3):
        folder = Folder(write_folder(tmp_path / f"hf{shards}", num_shards=shards))
        assert torch.equal(logits(decoder(folder), IDS), logits(gguf, IDS))


def test_half_precision_weights_become_fp32(tmp_path: Path):
    folder = Folder(write_folder(tmp_path / "hf", dtype=torch.bfloat16))
    assert folder.is_bf16
    expected = hf_weights()["model.layers.1.mlp.up_proj.weight"].bfloat16().float()
    assert torch.equal(folder.tensor("1.up", tuple(expected.shape)).float(), expected)


def test_bf16_weights_are_not_squeezed_into_fp16(tmp_path: Path):
    folder = Folder(write_folder(tmp_path / "hf", dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="overflow in fp16"):
        assemble(folder, torch.device("cpu"), torch.float16, 64)


def test_a_shard_that_is_missing_is_named(tmp_path: Path):
    path = write_folder(tmp_path / "hf", num_shards=2)
    (path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors: is missing"):
        Folder(path)


def test_files_outside_the_index_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_folder(tmp_path / "hf", num_shards=2)
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, path / "model.safetensors")
    folder = Folder(path)
    assert folder.tensor("norm", (HIDDEN,)).abs().sum() > 0
    told = capsys.readouterr()
    assert "model.safetensors" in told.out + told.err


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path):
    path = write_folder(tmp_path / "hf", num_shards=2)
    index = json.loads((path / INDEX).read_text())
    (moved,) = [name for name in index["weight_map"] if name == "model.norm.weight"]
    where = index["weight_map"][moved]
    index["weight_map"][moved] = "model-0.safetensors" if where.startswith("model-1") else "model-1.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        decoder(Folder(path))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "a\0b", "..", "link.safetensors"]
)
@pytest.mark.parametrize("is_there", [True, False])
def test_names_that_lead_out_of_the_folder_are_refused_alike(tmp_path: Path, name: str, is_there: bool):
    path = write_folder(tmp_path / "hf", num_shards=2)
    if is_there:
        save_file({"model.norm.weight": torch.zeros(HIDDEN)}, tmp_path / "secret.safetensors")
    os.symlink(tmp_path / "secret.safetensors", path / "link.safetensors")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="does not name a file of this folder"):
        Folder(path)


def test_links_into_the_blobs_of_a_cache_are_followed(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    write_folder(snapshot)
    (snapshot / "model.safetensors").rename(blobs / "123")
    os.symlink("../../blobs/123", snapshot / "model.safetensors")
    assert decoder(Folder(snapshot)).config.num_layers == LAYERS


def test_tied_in_the_config_and_a_head_in_the_file_uses_the_embedding(tmp_path: Path):
    plain = decoder(Folder(write_folder(tmp_path / "tied")))
    both = decoder(Folder(write_folder(tmp_path / "both", {HEAD: np.zeros((len(tokens()), HIDDEN), np.float32)})))
    assert torch.equal(logits(plain, IDS), logits(both, IDS))


def test_a_head_that_is_missing_is_named(tmp_path: Path):
    folder = Folder(write_folder(tmp_path / "hf", tie_word_embeddings=False))
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        decoder(folder)


def test_an_untied_head_is_used(tmp_path: Path):
    head = np.random.default_rng(5).normal(0, 0.3, (len(tokens()), HIDDEN)).astype(np.float32)
    untied = decoder(Folder(write_folder(tmp_path / "hf", {HEAD: head}, tie_word_embeddings=False)))
    tied = decoder(Folder(write_folder(tmp_path / "tied")))
    assert not torch.equal(logits(untied, IDS), logits(tied, IDS))
    gguf = GgufCheckpoint(Gguf(write(tmp_path / "tiny.gguf", {"output.weight": head})))
    assert torch.equal(logits(untied, IDS), logits(decoder(gguf), IDS))


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changed", "config", "told"),
    [
        ({UP: None}, {}, f"tensor {UP} is missing"),
        ({"model.layers.7.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, {}, "nobody expects: model.layers.7"),
        ({UP: np.zeros((0,), np.float32)}, {}, r"has shape \[0\]"),
        ({"model.extra": np.zeros((0,), np.float32)}, {}, "nobody expects: model.extra"),
        ({}, {"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight is missing"),
        ({}, {"vocab_size": 300}, r"embed_tokens\.weight has shape"),
        ({}, {"num_key_value_heads": 2}, "3 heads do not divide into 2"),
        ({}, {"head_dim": 24}, "head size 24"),
        ({}, {"hidden_size": "48"}, r"Expected `int`, got `str` - at `\$\.hidden_size`"),
        ({}, {"hidden_size": None}, "hidden_size"),
        ({}, {"model_type": "mamba"}, "model_type mamba; built are llama, mistral"),
        ({}, {"hidden_act": "gelu"}, "hidden_act gelu"),
        ({}, {"rope_scaling": {"type": "foo", "factor": 2.0}}, "rope scaling 'foo' is not built"),
        ({}, {"rope_scaling": {"rope_type": "linear"}}, "'linear' without a factor"),
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "rope factor is not a number"),
        ({}, {"rope_theta": 0.5}, "rope base 0.5"),
        ({}, {"quantization_config": {"bits": 4}}, "quantized safetensors"),
        ({}, {"partial_rotary_factor": 0.5}, "part of a head"),
        ({}, {"rms_norm_eps": 0.0}, "norm epsilon"),
        ({}, {"max_position_embeddings": 0}, "context is 0"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changed: dict, config: dict, told: str):
    path = write_folder(tmp_path / "hf", changed, **config)
    with pytest.raises(ModelError, match=told):
        decoder(Folder(path))


def test_old_buffers_beside_the_weights_are_ignored(tmp_path: Path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    decoder(Folder(write_folder(tmp_path / "hf", buffer)))


def test_every_truncation_and_every_surplus_is_refused(tmp_path: Path):
    path = write_folder(tmp_path / "hf")
    file = path / "model.safetensors"
    data = file.read_bytes()
    for broken in [data[:size] for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1)] + [data + b"\0" * 64]:
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            Folder(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff", "[" * 100_000])
def test_broken_json_is_refused_by_file(tmp_path: Path, name: str, text: str):
    path = write_folder(tmp_path / "hf")
    (path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        open_model(path)


def test_pickled_weights_and_code_are_not_touched(tmp_path: Path):
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    path = write_folder(tmp_path / "hf", auto_map={"AutoModel": "evil.Model"})
    (path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    Folder(path)  # the weights are there: the code is ignored
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle and is not loaded"):
        Folder(path)
    assert not (tmp_path / "executed").exists()


def test_what_ends_a_text_is_the_union_of_all_that_say_so(tmp_path: Path):
    path = write_folder(tmp_path / "hf", eos_token_id=7)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    _, text = open_model(path)
    assert text.tokenizer.eos_ids == {0, 5, 7}
    assert text.tokenizer.control_tokens == {SPECIALS[0]: 0, SPECIALS[1]: 1}


def test_nothing_ends_a_text(tmp_path: Path):
    path = write_folder(tmp_path / "hf", eos_token_id=None)
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="which token ends a text"):
        open_model(path)


def test_a_tokenizer_larger_than_the_embedding_is_a_contradiction(tmp_path: Path):
    small = {"model.embed_tokens.weight": np.zeros((200, HIDDEN), np.float32)}
    with pytest.raises(ModelError, match=r"260 tokens, its embedding 200 rows"):
        load(write_folder(tmp_path / "hf", small, vocab_size=200))


def test_the_template_comes_from_its_own_file_first(tmp_path: Path):
    path = write_folder(tmp_path / "hf")
    (path / "chat_template.jinja").write_text("own")
    assert open_model(path)[1].template == "own"
    (path / "chat_template.jinja").unlink()
    told = {"eos_token": {"content": SPECIALS[0]}, "chat_template": [{"name": "default", "template": "named"}]}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    assert open_model(path)[1].template == "named"


def test_a_sliding_window_bounds_the_context(tmp_path: Path):
    path = write_folder(tmp_path / "hf", model_type="mistral", sliding_window=40)
    assert Folder(path).config.context == 40
    with pytest.raises(ModelError, match="over the model's context of 40"):
        load(path)


def test_settings_that_this_machine_cannot_do(tmp_path: Path):
    path = write_folder(tmp_path / "hf")
    with pytest.raises(EngineError, match="the CPU computes in fp32"):
        load(path, dtype="fp16")
    with pytest.raises(ModelError, match=r"over the model's context of 256"):
        load_llm(Deployment("t", str(path), llm=Llm(max_model_len=300)), "", lambda _: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path):
    path = write_folder(tmp_path / "hf")
    with pytest.raises(EngineError, match="cuda:0 is not there"):
        load_llm(Deployment("t", str(path), devices="cuda:0", llm=Llm(max_model_len=64)), "", lambda _: None)


def test_new_weights_under_the_same_name_are_another_version(tmp_path: Path):
    path = write_folder(tmp_path / "hf")
    before = version(path, "fp32")
    assert version(path, "fp32") == before
    assert version(path, "fp16") != before
    write_folder(path, {"model.norm.weight": np.zeros(HIDDEN, np.float32)})
    assert version(path, "fp32") != before


def test_the_tokenizer_file_is_read_as_it_is(tmp_path: Path):
    path = write_folder(tmp_path / "hf")
    assert json.loads((path / "tokenizer.json").read_text()) == json.loads(tokenizer_json())
    _, text = open_model(path)
    assert text.tokenizer.encode("ab 12") == [
        258,
        *text.tokenizer.encode(" "),
        *text.tokenizer.encode("1"),
        *text.tokenizer.encode("2"),
    ]
