"""Owns the row-exact reference attention over paged KV: slow, plain, and the one others are compared with.

Knows no model and no scheduler. The bits of a query row depend on that row and its own context alone: keys are taken
in tiles of fixed size at absolute positions, the last one filled with zeros and masked; tiles are folded in order by
the online softmax (Milakov & Gimelshein 2018); query rows are padded to the smallest M of one bit class.
"""

from dataclasses import dataclass
from typing import Final

import torch

TILE: Final = 64
ROWS_MIN: Final = 4


@dataclass(slots=True)
class Span:
    """The query rows start .. start + length of a step: one sequence's chunk at positions first .. first + length.

    `slots` [num_tiles * TILE] are the cache slots of the sequence's positions, in order; beyond the context they are 0.
    """

    start: int
    length: int
    first: int
    slots: torch.Tensor


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Attention of q [num_tokens, num_heads, head_size] over caches [num_slots, num_kv_heads, head_size].

    Returns [num_tokens, num_heads * head_size]. Changes nothing.
    """
    num_tokens, num_heads, head_size = q.shape
    out = torch.empty_like(q)
    for span in spans:
        rows = q[span.start : span.start + span.length]
        out[span.start : span.start + span.length] = _one(rows, k_cache, v_cache, span)
    return out.view(num_tokens, num_heads * head_size)


def _one(rows: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, span: Span) -> torch.Tensor:
    length, num_heads, head_size = rows.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    # [kv, length * group, head]: row r of a KV head is token r // group.
    queries = rows.view(length, num_kv_heads, group, head_size).transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    num_rows = queries.shape[1]
    if num_rows < ROWS_MIN:
        queries = torch.cat([queries, queries.new_zeros(num_kv_heads, ROWS_MIN - num_rows, head_size)], 1)
    queries = queries * head_size**-0.5
    positions = span.first + torch.arange(queries.shape[1], device=rows.device) // group
    keys = k_cache[span.slots].transpose(0, 1)  # [kv, num_tiles * TILE, head]
    values = v_cache[span.slots].transpose(0, 1)
    end = span.first + length
    at = torch.arange(span.slots.shape[0], device=rows.device)
    peak = queries.new_full((num_kv_heads, queries.shape[1], 1), -torch.inf)
    total = torch.zeros_like(peak)
    result = torch.zeros_like(queries)
    for tile in range(0, span.slots.shape[0], TILE):
        inside = at[tile : tile + TILE]
        # What lies beyond the context is somebody else's slot 0: zero, so that not even a NaN of theirs gets here.
        alive = (inside < end).view(1, TILE, 1)
        k_tile = torch.where(alive, keys[:, tile : tile + TILE], 0.0).contiguous()
        v_tile = torch.where(alive, values[:, tile : tile + TILE], 0.0).contiguous()
        scores = torch.bmm(queries, k_tile.transpose(1, 2))
        scores = scores.masked_fill(inside.view(1, 1, -1) > positions.view(1, -1, 1), -torch.inf)
        peak_here = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # A row padded or before its first visible key has no peak yet: keep it from making NaN.
        safe = torch.where(peak_here == -torch.inf, 0.0, peak_here)
        weights = torch.exp(scores - safe)
        fade = torch.exp(peak - safe)
        total = total * fade + weights.sum(-1, keepdim=True)
        result = result * fade + torch.bmm(weights, v_tile)
        peak = peak_here
    result = result / total
    result = result[:, :num_rows].view(num_kv_heads, length, group, head_size)
    return result.transpose(0, 1).reshape(length, num_heads, head_size)
