"""Owns rotary position embedding: inverse frequencies of every scaling kind, tables, and the turning of q and k.

Knows no layer and no cache. Angles depend on a token's position and the model alone, never on the length of a sequence,
so that cached keys stay right while it grows.
"""

import math

import torch

from engine.models.config import Rope


def inverse_frequencies(rope: Rope, head_size: int, context: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Frequencies [head_size / 2] in float64 (Su et al. 2021), and the factor that cosines and sines are times.

    `context` is the length the model was made for, `max_len` the length it will be used with. Raises ValueError for a
    kind that is not built. dynamic: base for `max_len` where that is beyond `context`, for every position.
    """
    half = head_size // 2
    base = rope.base
    if rope.kind == "dynamic" and max_len > context:
        stretched = rope.factor * max_len / context - (rope.factor - 1)
        base *= stretched ** (head_size / (head_size - 2))
    inverse = base ** (-torch.arange(half, dtype=torch.float64) / half)
    scale = 1.0
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif rope.kind == "yarn":
        inverse, scale = _yarn(inverse, rope, head_size)
    elif rope.kind not in {"default", "dynamic"}:
        raise ValueError(rope.kind)
    if rope.divisors:
        inverse = inverse / torch.tensor(rope.divisors, dtype=torch.float64)
    return inverse, scale


def _llama3(inverse: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended."""
    turns = rope.original_context * inverse / (2 * math.pi)  # of each frequency within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return inverse * blend + inverse / rope.factor * (1 - blend)


def _yarn(inverse: torch.Tensor, rope: Rope, head_size: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023), with its attention temperature folded into cosines and sines."""

    def dimension(num_turns: float) -> float:
        waves = rope.original_context / (num_turns * 2 * math.pi)
        return head_size * math.log(waves) / (2 * math.log(rope.base))

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    scale = rope.attention_factor
    if scale is None:
        both = rope.mscale and rope.mscale_all_dim
        scale = temperature(rope.mscale) / temperature(rope.mscale_all_dim) if both else temperature(1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp), scale


def table(inverse: torch.Tensor, scale: float, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [num_positions, head_size / 2] in fp32, computed in float64."""
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [num_tokens, num_heads, head_size], whose two halves are pairs; cos and sin are [num_tokens, 1, half]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
