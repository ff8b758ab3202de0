"""Owns the way from a model's files to a warm runner with its tokenizer and its template.

Knows no socket. Called by `worker/load.py`, and the only place that imports torch on behalf of a worker.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from engine.config import Deployment
from engine.llm.bpe import BpeTokenizer, Vocabulary
from engine.llm.model_runner import ModelRunner
from engine.llm.template import ChatTemplate
from engine.models.config import ModelConfig, ModelError
from engine.models.decoder import Decoder, Layer
from engine.models.gguf import Gguf, expected_names, unpermute
from engine.models.linear import Linear
from engine.store.sources import resolve
from engine.worker.loaded import Loaded

CONTROL: Final = 3  # tokenizer.ggml.token_type of a control token


def load_llm(deployment: Deployment, cache_dir: str, enter: Callable[[str], None]) -> Loaded:
    """Load, build and warm up. `enter` is told the phases loading and warming. Raises ModelError naming the file."""
    enter("loading")
    path = resolve(deployment.model, Path(cache_dir))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // deployment.replicas))
    file = Gguf(path)
    config = file.config()
    llm = deployment.llm
    if llm.max_model_len > config.context:
        raise ModelError(
            str(path), f"max_model_len {llm.max_model_len} is over the model's context of {config.context}"
        )
    tokenizer = _tokenizer(file)
    decoder = build(file, config, llm.num_blocks * llm.block_size)
    runner = ModelRunner(decoder, llm.block_size, llm.max_num_seqs)
    enter("warming")
    is_exact = runner.warm(llm.max_batched_tokens)
    if not is_exact and llm.deterministic == "require":
        raise ModelError(str(path), "deterministic is 'require', and this machine's products are not row-exact")
    source = file.metadata.get("tokenizer.chat_template")
    template = ChatTemplate(str(source), tokenizer.control_tokens) if source else None
    return Loaded(runner, tokenizer, _version(path), template, is_exact, overlap=1)


def _version(path: Path) -> str:
    """What cached blocks belong to: the file, by name, size and time of change."""
    stat = path.stat()
    return f"{path.name[:40]}-{stat.st_size:x}-{stat.st_mtime_ns & 0xFFFFFFFF:x}"[:64]


def build(file: Gguf, config: ModelConfig, num_slots: int) -> Decoder:
    """The decoder with this file's weights in fp32. Raises ModelError for missing, surplus or misshapen tensors."""
    surplus = sorted(file.names - expected_names(config))
    if surplus:
        raise ModelError(str(file.path), f"tensors nobody expects: {', '.join(surplus[:5])}")
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_size
    heads = config.num_heads * config.head_size

    def vector(name: str) -> torch.Tensor:
        return torch.from_numpy(file.tensor(name, (hidden,)))

    def linear(name: str, rows: int, columns: int, num_heads: int = 0) -> Linear:
        weight = file.tensor(name, (rows, columns))
        return Linear(torch.from_numpy(np.ascontiguousarray(unpermute(weight, num_heads)) if num_heads else weight))

    layers = []
    for index in range(config.num_layers):
        at = f"blk.{index}."
        layers.append(
            Layer(
                vector(f"{at}attn_norm.weight"),
                linear(f"{at}attn_q.weight", heads, hidden, config.num_heads),
                linear(f"{at}attn_k.weight", kv, hidden, config.num_kv_heads),
                linear(f"{at}attn_v.weight", kv, hidden),
                linear(f"{at}attn_output.weight", hidden, heads),
                vector(f"{at}ffn_norm.weight"),
                linear(f"{at}ffn_gate.weight", config.ffn_size, hidden),
                linear(f"{at}ffn_up.weight", config.ffn_size, hidden),
                linear(f"{at}ffn_down.weight", hidden, config.ffn_size),
            )
        )
    embedding = torch.from_numpy(file.tensor("token_embd.weight", (config.vocab_size, hidden)))
    head = Linear(embedding) if config.is_tied else linear("output.weight", config.vocab_size, hidden)
    return Decoder(config, layers, (embedding, vector("output_norm.weight"), head), num_slots)


def _tokenizer(file: Gguf) -> BpeTokenizer:
    """The vocabulary of the file. Raises ModelError for a kind that is not built."""
    source = str(file.path)
    if file.need("tokenizer.ggml.model") != "gpt2":
        raise ModelError(source, f"tokenizer {file.need('tokenizer.ggml.model')!r}; byte-level BPE ('gpt2') is built")
    tokens, kinds = file.need("tokenizer.ggml.tokens"), file.need("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ModelError(source, f"{len(tokens)} tokens and {len(kinds)} token types")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    vocabulary = Vocabulary(
        tokens,
        merges,
        frozenset(id for id, kind in enumerate(kinds) if kind == CONTROL),
        str(file.metadata.get("tokenizer.ggml.pre", "default")),
        frozenset({int(file.need("tokenizer.ggml.eos_token_id"))}),
        int(bos) if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token") else None,
    )
    try:
        return BpeTokenizer(vocabulary)
    except KeyError as error:
        raise ModelError(source, f"text splitting {error} is not built") from None
    except ValueError as error:
        raise ModelError(source, f"its vocabulary does not fit its merges: {error}") from None
