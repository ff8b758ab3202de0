"""Owns what a GGUF file of the llama family says of its model, and its tensors by our names.

Knows no decoder and no tokenizer. Called by the loader of a worker. GGUF keeps the rows of q and k in pairs for an
interleaved rope; here they come in half-rotation order.
"""

from typing import Final

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from engine.models.checkpoint import shapes
from engine.models.config import ModelConfig, ModelError, Rope, scaled_context
from engine.models.gguf import Gguf

ARCHITECTURE: Final = "llama"
DIVISORS: Final = "rope_freqs.weight"
NAMES: Final = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
PARTS: Final = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def file_name(name: str) -> str:
    """Our name of a tensor as GGUF writes it."""
    if name in NAMES:
        return NAMES[name]
    layer, part, *bias = name.split(".")
    return f"blk.{layer}.{PARTS[part]}.{'bias' if bias else 'weight'}"


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k from GGUF's interleaved rope order to halves: pair (2i, 2i+1) becomes (i, i + head_size / 2)."""
    rows, *columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, *columns).swapaxes(1, 2).reshape(rows, *columns)


class GgufCheckpoint:
    """A model in a GGUF file."""

    is_bf16 = False  # everything is dequantized to fp32

    def __init__(self, file: Gguf) -> None:
        """Raises ModelError for another architecture, a contradiction, or a tensor that nobody expects."""
        self.file = file
        self.source = str(file.path)
        self.config = self._config()
        expected = {file_name(name) for name, _ in shapes(self.config)} | {DIVISORS}
        surplus = sorted(file.names - expected)
        if surplus:
            raise ModelError(self.source, f"tensors nobody expects: {', '.join(surplus[:5])}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `Checkpoint.tensor`, dequantized to fp32."""
        values = self.file.tensor(file_name(name), shape)
        part = name.split(".")[1] if "." in name else ""
        if part in {"q", "k"}:
            num_heads = self.config.num_heads if part == "q" else self.config.num_kv_heads
            values = np.ascontiguousarray(unpermute(values, num_heads))
        return torch.from_numpy(values)

    def _number(self, key: str, default: float | None = None) -> float:
        return self.file.number(f"{ARCHITECTURE}.{key}", default)

    def _config(self) -> ModelConfig:
        file = self.file
        architecture = file.text("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelError(self.source, f"architecture {architecture or 'unknown'}; the llama family is built")
        num_heads, hidden_size = int(self._number("attention.head_count")), int(self._number("embedding_length"))
        head_size = int(self._number("attention.key_length", hidden_size // max(num_heads, 1)))
        if int(self._number("attention.value_length", head_size)) != head_size:
            raise ModelError(self.source, "values of another size than keys are not built")
        if int(self._number("rope.dimension_count", head_size)) != head_size:
            raise ModelError(self.source, "rope over a part of a head is not built")
        if int(self._number("expert_count", 0)):
            raise ModelError(self.source, "mixtures of experts are not built")
        context, rope = int(self._number("context_length")), self._rope(head_size)
        embedding = file.shape(NAMES["embedding"])
        num_tokens = len(file.items("tokenizer.ggml.tokens", str))
        if num_tokens > embedding[0]:
            raise ModelError(self.source, f"{num_tokens} tokens, and {embedding[0]} rows in {NAMES['embedding']}")
        return ModelConfig(
            num_layers=int(self._number("block_count")),
            hidden_size=hidden_size,
            ffn_size=int(self._number("feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(self._number("attention.head_count_kv", num_heads)),
            head_size=head_size,
            vocab_size=embedding[0],
            context=scaled_context(context, rope),
            trained_context=context,
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            is_tied=NAMES["head"] not in file.names,
            rope=rope,
            name=file.text("general.name") or file.path.stem,
            has_qkv_bias=file_name("0.q.bias") in file.names,
            has_output_bias=file_name("0.output.bias") in file.names,
            has_ffn_bias=file_name("0.gate.bias") in file.names,
        ).check(self.source)

    def _rope(self, head_size: int) -> Rope:
        kind = self.file.text(f"{ARCHITECTURE}.rope.scaling.type") or "none"
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0)) or 1.0
        if kind not in {"none", "linear", "yarn"}:
            raise ModelError(self.source, f"rope scaling {kind!r} is not built")
        if kind == "none" and factor != 1.0:
            kind = "linear"
        divisors = DIVISORS in self.file.names
        rope = Rope(
            base=self._number("rope.freq_base", 10_000.0),
            kind="default" if kind == "none" else kind,
            factor=factor,
            original_context=int(self._number("rope.scaling.original_context_length", 0))
            or int(self._number("context_length")),
            beta_fast=self._number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._number("rope.scaling.yarn_beta_slow", 1.0),
            divisors=tuple(self.file.tensor(DIVISORS, (head_size // 2,)).tolist()) if divisors else (),
        )
        if kind == "yarn" and f"{ARCHITECTURE}.rope.scaling.attn_factor" in self.file.metadata:
            temperature = 1.0 if factor <= 1 else 0.1 * float(np.log(factor)) + 1.0
            attention = self._number("rope.scaling.attn_factor") * temperature
            rope = replace(rope, attention_factor=attention)
        return rope
