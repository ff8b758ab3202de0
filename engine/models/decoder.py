"""Owns the decoder of the llama family: embedding, layers with grouped-query attention over paged KV, head.

Knows rows of tokens and cache slots; no sequence, no sampler, no file format. Row-exact where its products and its
attention are. Called by the language-model runner.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from engine.attention.reference import Plan, attend
from engine.models.config import ModelConfig
from engine.models.linear import Linear
from engine.models.rope import inverse_frequencies, rotate, table


@dataclass(slots=True)
class Layer:
    """Weights of one layer. q, k and v are one product, gate and up another: their rows lie one after the other."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Ends:
    """What is before and after the layers: embedding [vocab, hidden], final norm [hidden], head."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: Linear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class Decoder:
    """Weights on one device, and after `make_cache` their KV cache."""

    def __init__(self, config: ModelConfig, layers: list[Layer], ends: Ends, max_len: int) -> None:
        """`max_len` is the longest sequence there will be."""
        self.config = config
        self.context = max_len
        self.layers = layers
        self.ends = ends
        self.device, self.dtype = ends.embedding.device, ends.embedding.dtype
        inverse, scale = inverse_frequencies(config.rope, config.head_size, config.trained_context, max_len)
        cos, sin = table(inverse, scale, max_len)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)
        self.k_cache = self.v_cache = torch.empty(0)
        self.zero_slot = 0

    def make_cache(self, num_slots: int, dtype: torch.dtype) -> None:
        """Room for `num_slots` positions; one more, `zero_slot`, is never written."""
        config = self.config
        shape = (config.num_layers, config.num_kv_heads, num_slots + 1, config.head_size)
        self.k_cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.zero_slot = num_slots

    @property
    def heads_per_kv(self) -> int:
        return self.config.num_heads // self.config.num_kv_heads

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, planned: Plan, last: torch.Tensor
    ) -> torch.Tensor:
        """One step. `token_ids`, `positions`, `slots` are [num_tokens]; `last` names the rows that want logits.

        Returns hidden states [len(last), hidden] for `logits`. Changes the KV cache at `slots`.
        """
        config = self.config
        x = self.ends.embedding[token_ids]
        cos, sin = self._cos[positions][:, None].to(x.dtype), self._sin[positions][:, None].to(x.dtype)
        num_turned = config.num_heads + config.num_kv_heads
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.attention_norm, config.norm_eps)
            qkv = layer.qkv(normed).view(-1, num_turned + config.num_kv_heads, config.head_size)
            qk = rotate(qkv[:, :num_turned], cos, sin)
            k_cache, v_cache = self.k_cache[index], self.v_cache[index]
            k_cache[:, slots] = qk[:, config.num_heads :].transpose(0, 1).to(k_cache.dtype)
            v_cache[:, slots] = qkv[:, num_turned:].transpose(0, 1).to(v_cache.dtype)
            x = x + layer.output(attend(qk[:, : config.num_heads], k_cache, v_cache, planned))
            gate, up = layer.gate_up(rms_norm(x, layer.ffn_norm, config.norm_eps)).chunk(2, -1)
            x = x + layer.down(silu(gate) * up)
        return rms_norm(x[last], self.ends.norm, config.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab] in fp32 of hidden states [num_rows, hidden]. Changes nothing."""
        return self.ends.head(hidden).float()
