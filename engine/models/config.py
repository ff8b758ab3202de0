"""Owns what a decoder must know of a model before it sees a weight, and the refusal of what does not fit together.

Knows no file format and no torch. Called by the loaders; a model that contradicts itself is refused by name.
"""

from msgspec import Struct

from ipc.errors import Code, EngineError


class ModelConfig(Struct, frozen=True):
    """One decoder of the llama family. Sizes are numbers of features; `rope_base` is theta."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context: int
    rope_base: float
    norm_eps: float
    is_tied: bool
    name: str = ""

    def check(self, source: str) -> "ModelConfig":
        """This config, if it is consistent. Raises ModelError naming the contradiction."""
        for field in ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_size", "vocab_size"):
            if getattr(self, field) < 1:
                raise ModelError(source, f"{field} is {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(source, f"{self.num_heads} heads do not divide into {self.num_kv_heads} KV heads")
        if self.head_size % 16:
            raise ModelError(source, f"head size {self.head_size} is not a multiple of 16")
        return self


class ModelError(EngineError):
    """The model's files are missing, broken or contradictory: exit 78, and no retry."""

    def __init__(self, source: str, message: str) -> None:
        super().__init__(Code.INVALID, f"{source}: {message}", "model")
