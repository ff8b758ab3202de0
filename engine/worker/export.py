"""Owns the export of a model: its files as a Hugging Face folder, for other tools to read.

Knows no socket and no scheduler. Called by the command line. What a folder cannot say is refused, not left out.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.models.checkpoint import Checkpoint, shapes
from engine.models.config import ModelConfig, ModelError
from engine.models.safetensors import file_name
from engine.worker.load_llm import open_model
from engine.worker.load_text import Text
from ipc.errors import Code, EngineError


def export(model: Path, target: Path, dtype: torch.dtype | None) -> list[Path]:
    """Write `target`/config.json and what belongs to it; weights in `dtype`, or none. Returns the files written.

    Raises EngineError: the model cannot be read, cannot be said in that form, or `target` holds something already.
    """
    checkpoint, text = open_model(model)
    if target.exists() and any(target.iterdir()):
        raise EngineError(Code.INVALID, f"{target} is not empty", "target")
    files: dict[str, str] = {
        "config.json": _json(config_json(checkpoint.config, text, checkpoint.source)),
        "generation_config.json": _json({"eos_token_id": sorted(text.tokenizer.eos_ids)}),
        "tokenizer.json": tokenizer_json(text),
        "tokenizer_config.json": _json(tokenizer_config(text)),
    }
    if text.template:
        files["chat_template.jinja"] = text.template
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (target / name).write_text(content, encoding="utf-8")
    if dtype is not None:
        save_file(weights(checkpoint, dtype), target / "model.safetensors", metadata={"format": "pt"})
        files["model.safetensors"] = ""
    return [target / name for name in files]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def config_json(config: ModelConfig, text: Text, source: str) -> dict[str, Any]:
    """config.json. Raises ModelError for what it has no words for."""
    rope = config.rope
    if rope.divisors:
        raise ModelError(source, "its rope is a list of divisors, which config.json cannot say")
    if config.has_qkv_bias != config.has_output_bias:
        raise ModelError(source, "biases on q, k and v alone cannot be said for this family")
    scaling: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in {"llama3", "yarn"}:
        scaling["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.is_truncated}
        scaling |= {
            name: value
            for name in ("attention_factor", "mscale", "mscale_all_dim")
            if (value := getattr(rope, name)) not in {None, 0.0}
        }
    names = text.tokenizer.names
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.trained_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.base,
        "rope_scaling": scaling if rope.kind != "default" else None,
        "rope_parameters": scaling,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_qkv_bias,
        "mlp_bias": config.has_ffn_bias,
        "vocab_size": config.vocab_size,
        "bos_token_id": text.tokenizer.control_tokens.get(names.get("bos_token", "")),
        "eos_token_id": sorted(text.tokenizer.eos_ids),
    }


def tokenizer_json(text: Text) -> str:
    """tokenizer.json, with control tokens as special ones and the BOS that prompts begin with."""
    tokenizer = text.tokenizer
    tree = json.loads(tokenizer.library_json())
    known = {each["id"] for each in tree["added_tokens"]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = [{"id": id, "content": name, **plain} for name, id in tokenizer.control_tokens.items() if id not in known]
    tree["added_tokens"] = sorted([*tree["added_tokens"], *control], key=lambda each: each["id"])
    if tokenizer.bos_id is not None:
        bos = tokenizer.names["bos_token"]
        first, rest = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        tree["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, rest],
            "pair": [first, rest, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
        }
    return json.dumps(tree, ensure_ascii=False)


def tokenizer_config(text: Text) -> dict[str, Any]:
    """tokenizer_config.json."""
    tokenizer = text.tokenizer
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.bos_id is not None,
        **tokenizer.names,
    }
    return told | ({"chat_template": text.template} if text.template else {})


def weights(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor by Hugging Face's name. Raises ModelError."""
    return {
        file_name(name): checkpoint.tensor(name, shape).to(dtype).contiguous()
        for name, shape in shapes(checkpoint.config)
    }
