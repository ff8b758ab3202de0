"""Owns the row-exact reference attention over paged KV: plain torch, and the one others are compared with.

Knows no model and no scheduler. The bits of a query row depend on that row and its own context alone: keys are taken in
tiles of fixed size at absolute positions; each tile's share of the softmax is computed by itself, and the shares are
added up in a binary tree over absolute tile numbers, in which a tile beyond the context is a zero. So it does not
matter with whom a row is computed, in which chunk, or how many tiles its neighbours have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

TILE: Final = 64
ROWS_MIN: Final = 4  # smallest M of one bit class
PIECE: Final = 64  # query tokens computed at once: what a long chunk is cut into
TILES_MAX: Final = 256  # tiles of one group: bounds what is gathered at once


@dataclass(slots=True)
class Span:
    """Query rows start .. start + length of a step: one sequence's chunk at positions first .. first + length.

    `table` maps position p to block table[p // block_size]; it covers every position up to the end of the chunk.
    """

    start: int
    length: int
    first: int
    table: Sequence[int]


@dataclass(slots=True)
class _Group:
    """Pieces of one length, computed together: G of them, L tokens each, over T tiles.

    `rows` [G * L] are rows of the step, `slots` [G * T * TILE] cache slots, `hidden` [1, G, T, R, TILE] what a query
    row must not see, where R is L times the query heads per KV head, padded.
    """

    num_pieces: int
    length: int
    num_tiles: int
    rows: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor


@dataclass(slots=True)
class Plan:
    """What the attention of one step needs beside its tensors: made once, used by every layer."""

    groups: list[_Group]


def plan(spans: list[Span], block_size: int, zero_slot: int, heads_per_kv: int, device: torch.device) -> Plan:
    """Group the rows of a step. `zero_slot` is a cache slot that is never written: positions beyond a context."""
    buckets: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        for offset in range(0, span.length, PIECE):
            length = min(PIECE, span.length - offset)
            piece = Span(span.start + offset, length, span.first + offset, span.table)
            num_tiles = (piece.first + length + TILE - 1) // TILE
            # Powers of two: a short context does not pay for the longest one of the step.
            buckets.setdefault((length, (num_tiles - 1).bit_length()), []).append(piece)
    groups = []
    for (length, _), pieces in buckets.items():
        num_tiles = max(piece.first + length + TILE - 1 for piece in pieces) // TILE
        size = max(1, TILES_MAX // num_tiles)
        layout = block_size, zero_slot, heads_per_kv
        groups += [_group(pieces[at : at + size], num_tiles, layout, device) for at in range(0, len(pieces), size)]
    return Plan(groups)


def _group(pieces: list[Span], num_tiles: int, layout: tuple[int, int, int], device: torch.device) -> _Group:
    block_size, zero_slot, heads_per_kv = layout
    length, count = pieces[0].length, num_tiles * TILE
    positions = np.arange(count)
    num_blocks = (count + block_size - 1) // block_size
    tables = np.zeros((len(pieces), num_blocks), np.int64)
    for table, piece in zip(tables, pieces, strict=True):
        known = piece.table[:num_blocks]
        table[: len(known)] = known
    first = np.array([piece.first for piece in pieces])
    slots = tables[:, positions // block_size] * block_size + positions % block_size
    slots[positions >= (first + length)[:, None]] = zero_slot
    num_rows = max(ROWS_MIN, length * heads_per_kv)
    tokens = np.minimum(np.arange(num_rows) // heads_per_kv, length - 1)
    hidden = positions[None, None] > (first[:, None] + tokens)[:, :, None]  # [G, R, T * TILE]
    hidden = hidden.reshape(len(pieces), num_rows, num_tiles, TILE).swapaxes(1, 2)[None]
    rows = np.array([piece.start for piece in pieces])[:, None] + np.arange(length)
    return _Group(
        len(pieces),
        length,
        num_tiles,
        torch.from_numpy(rows.reshape(-1)).to(device),
        torch.from_numpy(slots.reshape(-1)).to(device),
        torch.from_numpy(np.ascontiguousarray(hidden)).to(device),
    )


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, planned: Plan) -> torch.Tensor:
    """Attention of q [num_tokens, num_heads, head_size] over caches [num_kv_heads, num_slots, head_size].

    Caches may be of a narrower type. Returns [num_tokens, num_heads * head_size]. Changes nothing.
    """
    num_tokens, num_heads, head_size = q.shape
    out = torch.empty_like(q)
    scaled = q * head_size**-0.5
    for group in planned.groups:
        out[group.rows] = _attend(scaled[group.rows], k_cache, v_cache, group)
    return out.view(num_tokens, num_heads * head_size)


def _attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: _Group) -> torch.Tensor:
    """One group: q [G * L, num_heads, head_size], already scaled, gives the same shape."""
    kv, head_size = k_cache.shape[0], k_cache.shape[2]
    g, length, tiles = group.num_pieces, group.length, group.num_tiles
    num_rows = group.hidden.shape[3]
    # Rows of a KV head: token by token, its query heads side by side.
    rows = q.view(g, length, kv, -1, head_size).permute(2, 0, 1, 3, 4).reshape(kv, g, -1, head_size)
    num_real = rows.shape[2]
    if num_real < num_rows:
        rows = torch.cat([rows, rows.new_zeros(kv, g, num_rows - num_real, head_size)], 2)
    rows = rows[:, :, None].expand(kv, g, tiles, num_rows, head_size).reshape(-1, num_rows, head_size)
    keys = k_cache.index_select(1, group.slots).to(q.dtype).view(-1, TILE, head_size)
    values = v_cache.index_select(1, group.slots).to(q.dtype).view(-1, TILE, head_size)
    scores = torch.bmm(rows, keys.transpose(1, 2)).float().view(kv, g, tiles, num_rows, TILE)
    scores.masked_fill_(group.hidden, -torch.inf)
    peak = scores.amax((2, 4), keepdim=True)
    weights = scores.sub_(peak).exp_()
    shares = torch.bmm(weights.to(q.dtype).view(-1, num_rows, TILE), values).float()
    total = _tree(weights.sum(-1, keepdim=True))
    mixed = (_tree(shares.view(kv, g, tiles, num_rows, head_size)) / total)[:, :, :num_real].to(q.dtype)
    return mixed.view(kv, g, length, -1, head_size).permute(1, 2, 0, 3, 4).reshape(g * length, -1, head_size)


def _tree(x: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 2: neighbours first, then pairs of pairs. Zeros at the end change no bit of it."""
    while (count := x.shape[2]) > 1:
        pairs = x[:, :, 0 : count - 1 : 2] + x[:, :, 1:count:2]
        x = torch.cat([pairs, x[:, :, -1:]], 2) if count % 2 else pairs
    return x[:, :, 0]
