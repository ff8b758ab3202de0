"""Owns what a model's files must give: a config, and every tensor a decoder of that config has, under our own names.

Knows no file format; `gguf_checkpoint.py` and `safetensors.py` know one each. Called by the loader of a worker.
"""

from collections.abc import Iterator
from typing import Final, Protocol

import torch

from engine.models.config import ModelConfig, ModelError
from engine.models.decoder import Decoder, Ends, Layer
from engine.models.linear import Linear

PARTS: Final = ("attention_norm", "q", "k", "v", "output", "ffn_norm", "gate", "up", "down")


class Checkpoint(Protocol):
    """An opened model. `source` names it in errors, `is_bf16` says that its weights are stored in bfloat16."""

    config: ModelConfig
    source: str
    is_bf16: bool

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor on the CPU, q and k in half-rotation order. Raises ModelError: missing, or of another shape."""
        ...


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor: embedding, norm, head (unless tied), and LAYER.PART with its .bias."""
    hidden, ffn = config.hidden_size, config.ffn_size
    heads, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    sizes = {
        "attention_norm": (hidden,),
        "q": (heads, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "output": (hidden, heads),
        "ffn_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    biased = {
        "q": config.has_qkv_bias,
        "k": config.has_qkv_bias,
        "v": config.has_qkv_bias,
        "output": config.has_output_bias,
        "gate": config.has_ffn_bias,
        "up": config.has_ffn_bias,
        "down": config.has_ffn_bias,
    }
    yield "embedding", (config.vocab_size, hidden)
    yield "norm", (hidden,)
    if not config.is_tied:
        yield "head", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for part in PARTS:
            yield f"{layer}.{part}", sizes[part]
            if biased.get(part):
                yield f"{layer}.{part}.bias", sizes[part][:1]


def assemble(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, max_len: int) -> Decoder:
    """The decoder with these weights on a device. Raises ModelError naming the tensor or the contradiction."""
    config = checkpoint.config
    if dtype == torch.float16 and checkpoint.is_bf16:
        why = "its bfloat16 weights can overflow in fp16; take dtype bf16 or fp32"
        raise ModelError(checkpoint.source, why)
    expected = dict(shapes(config))

    def load(name: str) -> torch.Tensor:
        return checkpoint.tensor(name, expected[name]).to(dtype)

    def linear(layer: int, *parts: str) -> Linear:
        """The product of these parts, their rows one after the other."""
        names = [f"{layer}.{part}" for part in parts]
        weight = torch.cat([load(name) for name in names]) if len(names) > 1 else load(names[0])
        has_bias = f"{names[0]}.bias" in expected
        bias = torch.cat([load(f"{name}.bias") for name in names]).to(device) if has_bias else None
        return Linear(weight.to(device), bias)

    layers = [
        Layer(
            load(f"{index}.attention_norm").to(device),
            linear(index, "q", "k", "v"),
            linear(index, "output"),
            load(f"{index}.ffn_norm").to(device),
            linear(index, "gate", "up"),
            linear(index, "down"),
        )
        for index in range(config.num_layers)
    ]
    embedding = load("embedding").to(device)
    head = Linear(embedding if config.is_tied else load("head").to(device))
    return Decoder(config, layers, Ends(embedding, load("norm").to(device), head), max_len)
