"""Owns what a decoder must know of a model before it sees a weight, and the refusal of what does not fit together.

Knows no file format and no torch. Called by the loaders; a model that contradicts itself is refused by name.
"""

from typing import Final

from msgspec import Struct

from ipc.errors import Code, EngineError

HEAD_ALIGNMENT: Final = 16


class Rope(Struct, frozen=True):
    """Rotary position embedding: `kind` is default, linear, dynamic, llama3 or yarn; lengths are tokens.

    `attention_factor` None is yarn's own. `divisors` (of a GGUF file) divide the frequencies one by one.
    """

    base: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    is_truncated: bool = True
    divisors: tuple[float, ...] = ()


class ModelConfig(Struct, frozen=True):
    """One decoder of the llama family. Sizes are numbers of features. `context` is what its rope scaling makes of the
    `trained_context`, both in tokens.

    Another family is another set of values here: biases on the products of attention or of the feed-forward part.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context: int
    trained_context: int
    norm_eps: float
    is_tied: bool
    rope: Rope = Rope()
    name: str = ""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_ffn_bias: bool = False

    def check(self, source: str) -> "ModelConfig":
        """This config, if it is consistent. Raises ModelError naming the contradiction."""
        sizes = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_size", "vocab_size")
        for field in (*sizes, "context", "trained_context"):
            if getattr(self, field) < 1:
                raise ModelError(source, f"{field} is {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(source, f"{self.num_heads} heads do not divide into {self.num_kv_heads} KV heads")
        if self.head_size % HEAD_ALIGNMENT:
            raise ModelError(source, f"head size {self.head_size} is not a multiple of {HEAD_ALIGNMENT}")
        if not 0 < self.norm_eps < 1:
            raise ModelError(source, f"norm epsilon is {self.norm_eps}")
        rope = self.rope
        if not 1 < rope.base < float("inf") or not 0 < rope.factor < float("inf"):
            raise ModelError(source, f"rope base {rope.base} with factor {rope.factor}")
        if rope.divisors and (len(rope.divisors) * 2 != self.head_size or min(rope.divisors) <= 0):
            raise ModelError(source, f"{len(rope.divisors)} rope divisors do not fit heads of {self.head_size}")
        if rope.kind in {"llama3", "yarn"} and rope.original_context < 1:
            raise ModelError(source, f"rope {rope.kind} without its original context")
        if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
            raise ModelError(source, f"rope frequency factors {rope.low_freq_factor} and {rope.high_freq_factor}")
        return self


def scaled_context(context: int, rope: Rope) -> int:
    """Tokens that a model of `context` positions takes with its rope scaling.

    llama3's context is what the configuration says; linear and dynamic scaling multiply it, yarn its original one.
    """
    if rope.kind in {"linear", "dynamic"}:
        return int(context * rope.factor)
    if rope.kind == "yarn":
        return max(context, int((rope.original_context or context) * rope.factor))
    return context


class ModelError(EngineError):
    """The model's files are missing, broken or contradictory: exit 78, and no retry."""

    def __init__(self, source: str, message: str) -> None:
        super().__init__(Code.INVALID, f"{source}: {message}", "model")
