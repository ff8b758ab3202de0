"""Owns the reading of a GGUF file: its metadata, its tensors dequantized to fp32, and its model config.

Knows no decoder. The layout is parsed here, with every count and offset checked against the file before it is followed;
the formulas of the quantized types are the `gguf` package's. Called by `worker/load.py`. Format: version 2 and 3,
little-endian, as the ggml project's docs/gguf.md describes it.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.models.config import ModelConfig, ModelError

MAGIC: Final = b"GGUF"
COUNT_MAX: Final = 1 << 24
TEXT_MAX: Final = 1 << 24
DIMENSIONS_MAX: Final = 4
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT: Final = 8
_ARRAY: Final = 9


class Gguf:
    """An open file: `metadata` by key, tensors by name. Memory-mapped; a tensor is dequantized when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for whatever is not a whole GGUF file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(str(path), f"cannot be read: {error}") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        try:
            self._parse()
        except struct.error as error:
            raise ModelError(str(path), "is truncated") from error

    def _parse(self) -> None:
        if self._take(4) != MAGIC:
            raise ModelError(str(self.path), "is not a GGUF file")
        (version,) = self._unpack("I")
        if version not in {2, 3}:
            raise ModelError(str(self.path), f"GGUF version {version}; 2 and 3 are read")
        num_tensors, num_pairs = self._unpack("QQ")
        if max(num_tensors, num_pairs) > COUNT_MAX:
            raise ModelError(str(self.path), "claims more entries than any model has")
        for _ in range(num_pairs):
            key = self._text()
            (kind,) = self._unpack("I")
            self.metadata[key] = self._value(kind)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1 or alignment & (alignment - 1):
            raise ModelError(str(self.path), f"alignment {alignment} is not a power of two")
        start = (self._at + alignment - 1) // alignment * alignment
        for name, shape, kind, offset in infos:
            if name in self._tensors:
                raise ModelError(str(self.path), f"tensor {name} is there twice")
            if start + offset + self._size(name, shape, kind) > len(self._data):
                raise ModelError(str(self.path), f"is truncated: tensor {name} ends after the file does")
            self._tensors[name] = (shape, kind, start + offset)

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise ModelError(str(self.path), "is truncated")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def _unpack(self, code: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + code)
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _text(self) -> str:
        (size,) = self._unpack("Q")
        if size > TEXT_MAX:
            raise ModelError(str(self.path), "a text is longer than the file could hold")
        return self._take(size).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ModelError(str(self.path), f"metadata of unknown type {kind}")
        inner, count = self._unpack("IQ")
        if count > COUNT_MAX:
            raise ModelError(str(self.path), "an array is longer than the file could hold")
        if inner in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[inner]}"))
        if inner == _TEXT:
            return [self._text() for _ in range(count)]
        raise ModelError(str(self.path), f"an array of unknown type {inner}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._text()
        (num_dimensions,) = self._unpack("I")
        if not 1 <= num_dimensions <= DIMENSIONS_MAX:
            raise ModelError(str(self.path), f"tensor {name} has {num_dimensions} dimensions")
        shape = self._unpack(f"{num_dimensions}Q")
        kind, offset = self._unpack("IQ")
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(str(self.path), f"tensor {name} is of unknown type {kind}") from None
        return name, tuple(reversed(shape)), quantization, offset

    def _size(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block:
            raise ModelError(str(self.path), f"tensor {name}: rows of {shape[-1]} are no whole blocks of {per_block}")
        return int(np.prod(shape, dtype=np.int64)) // per_block * block_bytes

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """One tensor as fp32 of this shape, row-major. Raises ModelError when it is missing or shaped otherwise."""
        if name not in self._tensors:
            raise ModelError(str(self.path), f"tensor {name} is missing")
        found, kind, start = self._tensors[name]
        if found != shape:
            raise ModelError(str(self.path), f"tensor {name} has shape {list(found)}; {list(shape)} was expected")
        size = self._size(name, found, kind)
        raw = np.frombuffer(self._data, np.uint8, size, start)
        if kind is GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(shape).copy()
        if kind is GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(shape)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        try:
            return dequantize(raw.reshape(*shape[:-1], shape[-1] // per_block * block_bytes), kind).reshape(shape)
        except NotImplementedError:
            raise ModelError(str(self.path), f"tensor {name}: type {kind.name} is not dequantized here") from None

    def need(self, key: str) -> Any:
        """One metadata value. Raises ModelError when it is missing."""
        if key not in self.metadata:
            raise ModelError(str(self.path), f"metadata {key} is missing")
        return self.metadata[key]

    def config(self) -> ModelConfig:
        """The decoder's config. Raises ModelError for another architecture or a contradiction."""
        architecture = self.need("general.architecture")
        if architecture != "llama":
            raise ModelError(str(self.path), f"architecture {architecture}; the llama family is built")
        if "llama.rope.scaling.type" in self.metadata or "rope_freqs.weight" in self._tensors:
            raise ModelError(str(self.path), "scaled rope is not built yet")

        def number(key: str, default: int | None = None) -> int:
            return int(self.need(f"llama.{key}") if default is None else self.metadata.get(f"llama.{key}", default))

        num_heads, hidden_size = number("attention.head_count"), number("embedding_length")
        head_size = number("attention.key_length", hidden_size // max(num_heads, 1))
        if number("rope.dimension_count", head_size) != head_size:
            raise ModelError(str(self.path), "rope over a part of a head is not built")
        return ModelConfig(
            num_layers=number("block_count"),
            hidden_size=hidden_size,
            ffn_size=number("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=number("attention.head_count_kv", num_heads),
            head_size=head_size,
            vocab_size=len(self.need("tokenizer.ggml.tokens")),
            context=number("context_length"),
            rope_base=float(self.metadata.get("llama.rope.freq_base", 10_000.0)),
            norm_eps=float(self.need("llama.attention.layer_norm_rms_epsilon")),
            is_tied="output.weight" not in self._tensors,
            name=str(self.metadata.get("general.name", self.path.stem)),
        ).check(str(self.path))


def expected_names(config: ModelConfig) -> frozenset[str]:
    """Every tensor a llama-family file of this config holds."""
    names = {"token_embd.weight", "output_norm.weight"}
    if not config.is_tied:
        names.add("output.weight")
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    names |= {f"blk.{layer}.{part}.weight" for layer in range(config.num_layers) for part in parts}
    return frozenset(names)


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k from GGUF's interleaved rope order to halves: pair (2i, 2i+1) becomes (i, i + head_size / 2)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
