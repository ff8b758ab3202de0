"""Owns the reading of a GGUF file: its metadata, and its tensors dequantized to fp32.

Knows no model. The layout is parsed here, with every count and offset checked against the file before it is followed;
the formulas of the quantized types are the `gguf` package's. Called by `models/gguf_checkpoint.py`. Format: version 2
and 3, little-endian, as the ggml project's docs/gguf.md describes it.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.models.config import ModelError

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
        self._check_places(start, alignment)

    def _check_places(self, start: int, alignment: int) -> None:
        """Tensors follow one another, and nothing follows them. Raises ModelError."""
        end = start
        for name, (shape, kind, at) in sorted(self._tensors.items(), key=lambda item: item[1][2]):
            size = self._size(name, shape, kind)
            if size and at < end:
                raise ModelError(str(self.path), f"tensor {name} lies over the one before it")
            end = max(end, at + size)
        if len(self._data) - end >= max(alignment, 1) and self._tensors:
            raise ModelError(str(self.path), f"is oversized: {len(self._data) - end} bytes follow its last tensor")

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

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError when it is missing."""
        if name not in self._tensors:
            raise ModelError(str(self.path), f"tensor {name} is missing")
        return self._tensors[name][0]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """One tensor as fp32 of this shape, row-major. Raises ModelError when it is missing or shaped otherwise."""
        if self.shape(name) != shape:
            raise ModelError(
                str(self.path), f"tensor {name} has shape {list(self.shape(name))}; {list(shape)} was expected"
            )
        found, kind, start = self._tensors[name]
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

    def text(self, key: str) -> str:
        """A text, "" when it is missing. Raises ModelError when it is something else."""
        value = self.metadata.get(key, "")
        if not isinstance(value, str):
            raise ModelError(str(self.path), f"metadata {key} is not a text")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises ModelError when it is missing without a default, or something else."""
        value = self.need(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(str(self.path), f"metadata {key} is not a number")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of values of one kind. Raises ModelError when it is missing or something else."""
        values = self.need(key)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ModelError(str(self.path), f"metadata {key} is not a list of {kind.__name__}")
        return values
