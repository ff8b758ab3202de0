"""Against the reference implementation: logits, frequencies of every rope kind, biases, other families by values."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.config import Rope
from engine.models.gguf import Gguf
from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.rope import inverse_frequencies
from engine.models.safetensors import Folder
from tests.models.test_safetensors import decoder, logits
from tests.models_tiny import CONTEXT, FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, hf_config, write, write_folder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM, MistralForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

IDS = np.random.default_rng(9).integers(2, 250, 200).tolist()
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, object] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "linear, old name": {"type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, all set": {
        "rope_type": "yarn",
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.1,
        "truncate": False,
        **YARN,
    },
    "yarn, mscale": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.4, **YARN},
}


def reference(path: Path, model: type = LlamaForCausalLM) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def compare(path: Path, ids: list[int], model: type = LlamaForCausalLM) -> None:
    expected = reference(path, model)(torch.tensor([ids])).logits[0]
    got = logits(decoder(Folder(path), 256), ids)
    assert torch.allclose(got, expected, atol=2e-4, rtol=2e-4), (got - expected).abs().max()
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.99


@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_of_every_rope_kind(tmp_path: Path, kind: str):
    compare(write_folder(tmp_path / "hf", rope_scaling=KINDS[kind]), IDS)


@pytest.mark.parametrize("kind", list(KINDS))
def test_inverse_frequencies_equal_the_reference(tmp_path: Path, kind: str):
    path = write_folder(tmp_path / "hf", rope_scaling=KINDS[kind], rope_theta=100000.0)
    config = Folder(path).config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = LlamaConfig(**copy.deepcopy(hf_config(rope_scaling=KINDS[kind], rope_theta=100000.0)))
    if kind == "none":
        expected, scale = 100000.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[config.rope.kind](told, "cpu")
    got, got_scale = inverse_frequencies(config.rope, HEAD, CONTEXT, CONTEXT)
    assert torch.allclose(got.float(), expected.float(), rtol=1e-5)
    assert got_scale == pytest.approx(scale)


@pytest.mark.parametrize("length", [256, 300, 512])
def test_dynamic_scaling_is_that_of_the_longest_sequence(length: int):
    """The reference changes its base as a sequence grows; ours is the reference's at max_model_len, from the start."""
    told = LlamaConfig(**hf_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](told, "cpu", seq_len=length)
    got, _ = inverse_frequencies(Rope(kind="dynamic", factor=2.0), HEAD, CONTEXT, length)
    assert torch.allclose(got.float(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 1.5}, 384),
        ({"rope_type": "llama3", **LLAMA3}, 256),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_the_context_follows_the_config(tmp_path: Path, scaling: dict, context: int):
    assert Folder(write_folder(tmp_path / "hf", rope_scaling=scaling)).config.context == context


def test_the_rope_base_is_read(tmp_path: Path):
    path = write_folder(tmp_path / "hf", rope_theta=100000.0)
    compare(path, IDS)
    far, near = (logits(decoder(Folder(p), 256), IDS) for p in (path, write_folder(tmp_path / "other")))
    assert not torch.allclose(far[-1], near[-1], atol=1e-3)


def test_newer_folders_keep_rope_in_one_place(tmp_path: Path):
    parameters = {"rope_type": "llama3", "rope_theta": 50000.0, **LLAMA3}
    compare(write_folder(tmp_path / "hf", rope_theta=None, rope_parameters=parameters), IDS)


def test_biases_are_values_of_the_config(tmp_path: Path):
    dice = np.random.default_rng(2)
    sizes = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "o": HIDDEN}
    biases = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        biases |= {f"{at}.self_attn.{part}_proj.bias": dice.normal(0, 1, size) for part, size in sizes.items()}
        biases |= {f"{at}.mlp.{part}_proj.bias": dice.normal(0, 1, FFN) for part in ("gate", "up")}
        biases[f"{at}.mlp.down_proj.bias"] = dice.normal(0, 1, HIDDEN)
    changed = {name: value.astype(np.float32) for name, value in biases.items()}
    compare(write_folder(tmp_path / "hf", changed, attention_bias=True, mlp_bias=True), IDS[:50])


def test_a_mistral(tmp_path: Path):
    compare(write_folder(tmp_path / "hf", model_type="mistral", sliding_window=4096), IDS, MistralForCausalLM)


def test_untied_and_half_precision(tmp_path: Path):
    head = np.random.default_rng(5).normal(0, 0.3, (260, HIDDEN)).astype(np.float32)
    changed = {"lm_head.weight": head}
    compare(write_folder(tmp_path / "hf", changed, torch.bfloat16, 2, tie_word_embeddings=False), IDS[:50])


def gguf_config(path: Path, **metadata: object) -> Rope:
    return GgufCheckpoint(Gguf(write(path, **metadata))).config.rope


def test_rope_scaling_of_a_gguf_file(tmp_path: Path):
    """The same kinds by GGUF's keys; llama3 comes as a tensor of divisors."""
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    yarn = gguf_config(tmp_path / "yarn.gguf", **keys)
    hf = Folder(write_folder(tmp_path / "yarn", rope_scaling=KINDS["yarn"])).config.rope
    for one, other in zip(
        inverse_frequencies(yarn, HEAD, CONTEXT, CONTEXT), inverse_frequencies(hf, HEAD, CONTEXT, CONTEXT), strict=True
    ):
        assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other))
    linear = gguf_config(tmp_path / "linear.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert (linear.kind, linear.factor) == ("linear", 2.0)
    plain, _ = inverse_frequencies(Rope(), HEAD, CONTEXT, CONTEXT)
    llama3 = Rope(10000.0, "llama3", 8.0, 64)
    scaled, _ = inverse_frequencies(llama3, HEAD, CONTEXT, CONTEXT)
    divisors = (plain / scaled).float().numpy()
    file = write(tmp_path / "llama3.gguf", {"rope_freqs.weight": divisors})
    got, _ = inverse_frequencies(GgufCheckpoint(Gguf(file)).config.rope, HEAD, CONTEXT, CONTEXT)
    assert torch.allclose(got, scaled, rtol=1e-6)
