"""Owns the decoder of the llama family: embedding, layers with grouped-query attention over paged KV, head.

Knows rows of tokens and cache slots; no sequence, no sampler, no file format. Row-exact where its products and its
attention are. Called by the language-model runner.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.reference import Span, attend
from engine.models.config import ModelConfig
from engine.models.linear import Linear


class Weights(Protocol):
    """Where a decoder takes its tensors from, by name and expected shape."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]: ...


@dataclass(slots=True)
class Layer:
    attention_norm: torch.Tensor
    q: Linear
    k: Linear
    v: Linear
    output: Linear
    ffn_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope_table(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [num_positions, head_size / 2] (Su et al. 2021), computed in float64."""
    half = config.head_size // 2
    inverse = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rope on x [num_tokens, num_heads, head_size] in halves."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Decoder:
    """Weights on one device and their KV cache of `num_slots` positions."""

    def __init__(
        self, config: ModelConfig, layers: list[Layer], ends: tuple[torch.Tensor, torch.Tensor, Linear], num_slots: int
    ) -> None:
        """`ends` are the embedding [vocab, hidden], the final norm and the head."""
        self.config = config
        self.layers = layers
        self.embedding, self.norm, self.head = ends
        device, dtype = self.embedding.device, self.embedding.dtype
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_size)
        self.k_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        cos, sin = rope_table(config, config.context)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: list[Span],
        last: torch.Tensor,
    ) -> torch.Tensor:
        """One step. `token_ids`, `positions`, `slots` are [num_tokens]; `last` names the rows that want logits.

        Returns logits [len(last), vocab] in fp32. Changes the KV cache at `slots`.
        """
        config = self.config
        x = self.embedding[token_ids]
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.attention_norm, config.norm_eps)
            q = rotate(layer.q(normed).view(-1, config.num_heads, config.head_size), cos, sin)
            k = rotate(layer.k(normed).view(-1, config.num_kv_heads, config.head_size), cos, sin)
            self.k_cache[index, slots] = k
            self.v_cache[index, slots] = layer.v(normed).view(-1, config.num_kv_heads, config.head_size)
            x = x + layer.output(attend(q, self.k_cache[index], self.v_cache[index], spans))
            normed = rms_norm(x, layer.ffn_norm, config.norm_eps)
            x = x + layer.down(torch.nn.functional.silu(layer.gate(normed)) * layer.up(normed))
        return self.head(rms_norm(x[last], self.norm, config.norm_eps)).float()
