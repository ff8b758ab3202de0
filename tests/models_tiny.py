"""Owns tiny random models as real files, GGUF and Hugging Face folders of the same weights. No network."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from engine.llm.text_tokenizer import TextTokenizer
from engine.llm.vocabulary import CONTROL, Lists, byte_letters, from_lists
from engine.models import gguf_checkpoint, safetensors

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, LAYERS = 48, 96, 3, 1, 16, 2
CONTEXT = 256
EPS = 1e-5
SPECIALS = ["<|end|>", "<|start|>"]
TURNS = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
TEMPLATE = TURNS + "{{ '<|start|>assistant\n' }}"
MERGES = ["a b", "Ġ a"]


def tokens() -> list[str]:
    letters = byte_letters()
    return [*SPECIALS, *sorted(letters, key=letters.__getitem__), "ab", "Ġa"]


def tokenizer(eos_ids: frozenset[int] = frozenset({0}), is_bos_added: bool = False) -> TextTokenizer:
    names = tokens()
    kinds = [CONTROL if name in SPECIALS else 1 for name in names]
    return from_lists(Lists("gpt2", names, kinds, MERGES, [], "smollm", eos_ids, 1, is_bos_added))


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


Changes = dict[str, np.ndarray | None]


def write(path: Path, changed: Changes | None = None, **metadata: object) -> Path:
    """A whole GGUF file; `changed` replaces, adds or (None) leaves out tensors, `metadata` overrides llama.* values."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    } | metadata
    for key, value in numbers.items():
        if isinstance(value, str):
            writer.add_string(f"llama.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"llama.{key}", value)
        elif value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", EPS)
    writer.add_name("tiny")
    names = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([CONTROL if name in SPECIALS else 1 for name in names])
    writer.add_token_merges(MERGES)
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


def hf_weights(changed: Changes | None = None) -> dict[str, torch.Tensor]:
    """The same weights by Hugging Face's names, q and k in half-rotation order; `changed` as in `write`, by theirs."""
    names = {gguf_checkpoint.file_name(name): safetensors.file_name(name) for name in ours()}
    made: Changes = {}
    for name, tensor in weights().items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[2] if name.startswith("blk") else "")
        made[names[name]] = gguf_checkpoint.unpermute(tensor, heads) if heads else tensor
    made |= changed or {}
    return {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in made.items() if tensor is not None}


def ours() -> list[str]:
    """Our names of all tensors."""
    parts = [f"{layer}.{part}" for layer in range(LAYERS) for part in gguf_checkpoint.PARTS]
    return ["embedding", "norm", *parts]


def hf_config(**changes: object) -> dict[str, object]:
    """config.json of the tiny model; a change to None leaves a field out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": len(tokens()),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def write_folder(
    path: Path,
    changed: Changes | None = None,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 0,
    **config: object,
) -> Path:
    """A Hugging Face folder; with `num_shards` several files and their index."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype) for name, tensor in hf_weights(changed).items()}
    (path / "config.json").write_text(json.dumps(hf_config(**config)))
    (path / "tokenizer.json").write_text(tokenizer_json())
    told = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[0], "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    if not num_shards:
        save_file(tensors, path / "model.safetensors")
        return path
    places = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, where in places.items() if where == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def tokenizer_json() -> str:
    """The tokenizer.json of the tiny vocabulary, as Hugging Face's own tools write it."""
    tree = json.loads(tokenizer().library_json())
    tree["added_tokens"] = [
        {
            "id": id,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for id, name in enumerate(SPECIALS)
    ]
    return json.dumps(tree)
