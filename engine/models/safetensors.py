"""Owns a Hugging Face folder: config.json, its safetensors files memory-mapped and checked against their index.

Knows no decoder and no tokenizer. Called by the loader of a worker. Nothing of a folder is executed: pickled weights
and code of a model are not looked at.
"""

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from engine.models.checkpoint import shapes
from engine.models.config import ModelConfig, ModelError, Rope, scaled_context

log = structlog.get_logger("models")

JSON_BYTES_MAX: Final = 64 * 1024 * 1024
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
TYPES: Final = {"F64", "F32", "F16", "BF16"}
FAMILIES: Final = {"llama", "mistral"}
IGNORED: Final = ("rotary_emb.inv_freq",)  # buffers that old exports wrote beside the weights
NAMES: Final = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
PARTS: Final = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
T = TypeVar("T")


class HfConfig(Struct, frozen=True):
    """The fields of config.json that are read; whatever else it says is ignored."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    partial_rotary_factor: float = 1.0
    quantization_config: dict[str, Any] | None = None
    auto_map: dict[str, Any] | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


def read_json(path: Path, kind: type[T]) -> T:
    """A JSON file as `kind`. Raises ModelError naming file and field."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ModelError(str(path), f"is oversized: over {JSON_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(str(path), f"{error}") from error


def file_name(name: str) -> str:
    """Our name of a tensor as Hugging Face writes it."""
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    layer, part, *bias = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.{'bias' if bias else 'weight'}"


class Folder:
    """A model in a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError: a file is missing, broken, contradictory, or holds tensors that nobody expects."""
        self.path = path
        self.source = str(path)
        self.raw = read_json(path / "config.json", HfConfig)
        self.config = self._config()
        self._files: dict[str, Any] = {}
        self._places = self._map()
        self._check_surplus()
        self.is_bf16 = self._type("norm") == "BF16"

    # config.json

    def _config(self) -> ModelConfig:
        raw, source = self.raw, str(self.path / "config.json")
        if raw.model_type not in FAMILIES:
            raise ModelError(source, f"model_type {raw.model_type}; built are {', '.join(sorted(FAMILIES))}")
        if raw.hidden_act != "silu":
            raise ModelError(source, f"hidden_act {raw.hidden_act}; silu is built")
        if raw.quantization_config is not None:
            raise ModelError(source, "quantization_config: quantized safetensors are not built")
        if raw.auto_map is not None:
            log.warning("model_code_ignored", file=source)
        rope, context = self._rope(source), raw.max_position_embeddings
        limit = scaled_context(context, rope)
        if raw.sliding_window is not None:
            limit = min(limit, raw.sliding_window)  # within its window, such a model is an ordinary one
        return ModelConfig(
            num_layers=raw.num_hidden_layers,
            hidden_size=raw.hidden_size,
            ffn_size=raw.intermediate_size,
            num_heads=raw.num_attention_heads,
            num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
            head_size=raw.head_dim or raw.hidden_size // max(raw.num_attention_heads, 1),
            vocab_size=raw.vocab_size,
            context=limit,
            trained_context=context,
            norm_eps=raw.rms_norm_eps,
            is_tied=raw.tie_word_embeddings,
            rope=rope,
            name=self.path.name,
            has_qkv_bias=raw.attention_bias,
            has_output_bias=raw.attention_bias,
            has_ffn_bias=raw.mlp_bias,
        ).check(source)

    def _rope(self, source: str) -> Rope:
        """From rope_parameters, or from rope_theta and rope_scaling, whose kind older files call `type`."""
        raw = self.raw
        told = {**(raw.rope_scaling or {}), **(raw.rope_parameters or {})}
        kind = told.get("rope_type", told.get("type", "default"))
        if kind not in {"default", "linear", "dynamic", "llama3", "yarn"}:
            raise ModelError(source, f"rope scaling {kind!r} is not built")

        def number(key: str, default: float) -> float:
            value = told.get(key)
            if value is None:
                return default
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ModelError(source, f"rope {key} is not a number")
            return float(value)

        if kind != "default" and "factor" not in told:
            raise ModelError(source, f"rope scaling {kind!r} without a factor")
        if number("partial_rotary_factor", raw.partial_rotary_factor) != 1.0:
            raise ModelError(source, "rope over a part of a head is not built")
        return Rope(
            base=number("rope_theta", 10_000.0 if raw.rope_theta is None else raw.rope_theta),
            kind=kind,
            factor=number("factor", 1.0),
            original_context=int(number("original_max_position_embeddings", raw.max_position_embeddings)),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0) or 32.0,
            beta_slow=number("beta_slow", 1.0) or 1.0,
            attention_factor=None if told.get("attention_factor") is None else number("attention_factor", 1.0),
            mscale=number("mscale", 0.0),
            mscale_all_dim=number("mscale_all_dim", 0.0),
            is_truncated=told.get("truncate") is not False,
        )

    # Weights.

    def _map(self) -> dict[str, str]:
        """Tensor -> file. An index decides alone; other files are left out, and a warning says so."""
        present = sorted(each.name for each in self.path.glob("*.safetensors"))
        if (self.path / INDEX).is_file():
            places = read_json(self.path / INDEX, _Index).weight_map
            indexed = sorted(set(places.values()))
            for name in indexed:
                self._open(name)
            if extra := sorted(set(present) - set(indexed)):
                log.warning("files_outside_index_ignored", folder=self.source, files=extra)
            return places
        if not present:
            pickled = sorted(each.name for each in self.path.glob("*.bin")) + sorted(
                each.name for each in self.path.glob("*.pt*")
            )
            why = f"{pickled[0]} is a pickle and is not loaded" if pickled else "there is none"
            raise ModelError(self.source, f"no safetensors file: {why}")
        if SINGLE not in present and len(present) > 1:
            raise ModelError(self.source, f"several safetensors files and no {INDEX}: {', '.join(present[:5])}")
        name = SINGLE if SINGLE in present else present[0]
        if extra := [each for each in present if each != name]:
            log.warning("files_beside_model_ignored", folder=self.source, files=extra)
        return dict.fromkeys(self._open(name).keys(), name)

    def _open(self, name: str) -> Any:
        """One file, memory-mapped. Raises ModelError for a name that leads elsewhere, and for a broken file."""
        if name not in self._files:
            path = self.path / name
            if "/" in name or "\0" in name or name in {"", ".", ".."} or not self._is_ours(path):
                raise ModelError(self.source, f"{name!r} in its index does not name a file of this folder")
            try:
                self._files[name] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise ModelError(str(path), "is missing") from error
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(str(path), f"is not a whole safetensors file: {error}") from error
        return self._files[name]

    def _is_ours(self, path: Path) -> bool:
        """Links may stay in the folder, or lead into the blobs of the cache that the folder is a snapshot of."""
        real, home = path.resolve(), self.path.resolve()
        return home in real.parents or home.parent.parent / "blobs" in real.parents

    def _check_surplus(self) -> None:
        expected = {file_name(name) for name, _ in shapes(self.config)} | {file_name("head")}
        surplus = sorted(name for name in self._places if name not in expected and not name.endswith(IGNORED))
        if surplus:
            raise ModelError(self.source, f"tensors nobody expects: {', '.join(surplus[:5])}")

    def _slice(self, name: str) -> Any:
        full = file_name(name)
        if full not in self._places:
            raise ModelError(self.source, f"tensor {full} is missing")
        place = self._places[full]
        file = self._open(place)
        try:
            return file.get_slice(full)
        except SafetensorError as error:
            raise ModelError(
                str(self.path / place), f"tensor {full} is missing, and {INDEX} says it is here"
            ) from error

    def _type(self, name: str) -> str:
        kind: str = self._slice(name).get_dtype()
        return kind

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `Checkpoint.tensor`, in its stored type."""
        part, full = self._slice(name), file_name(name)
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                self.source, f"tensor {full} has shape {list(part.get_shape())}; {list(shape)} was expected"
            )
        if part.get_dtype() not in TYPES:
            raise ModelError(self.source, f"tensor {full}: type {part.get_dtype()} is not built")
        found: torch.Tensor = part[:]
        return found
