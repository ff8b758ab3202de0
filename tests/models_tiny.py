"""Owns tiny random models as real GGUF files, for tests of loaders, decoder and equivalence. No network, no weights."""

from pathlib import Path

import gguf
import numpy as np

from engine.llm.bpe import byte_letters

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, LAYERS = 48, 96, 3, 1, 16, 2
SPECIALS = ["<|end|>", "<|start|>"]
TURNS = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
TEMPLATE = TURNS + "{{ '<|start|>assistant\n' }}"


def tokens() -> list[str]:
    return [*SPECIALS, *sorted(byte_letters(), key=lambda letter: byte_letters()[letter]), "ab", "Ġa"]


def shapes() -> dict[str, tuple[int, ...]]:
    made = {"token_embd.weight": (len(tokens()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        made |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return made


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    return {
        name: (dice.normal(0, 0.3, shape) + (1 if "norm" in name else 0)).astype(np.float32)
        for name, shape in shapes().items()
    }


def write(path: Path, changed: dict[str, np.ndarray | None] | None = None, **metadata: object) -> Path:
    """A whole model file; `changed` replaces, adds or (None) leaves out tensors, `metadata` overrides numbers."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    } | metadata
    for key, value in numbers.items():
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_name("tiny")
    names = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in SPECIALS else 1 for name in names])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in (weights() | (changed or {})).items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
