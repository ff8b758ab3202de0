"""Owns the way from a model's files to a warm runner with its tokenizer and its template.

Knows no socket. Called by `worker/load.py`, and the only place that imports torch on behalf of a worker.
"""

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

import torch

from engine.config import Defaults, Deployment, Llm
from engine.llm.model_runner import ModelRunner
from engine.llm.reasoning import OPEN
from engine.llm.template import ChatTemplate
from engine.models.checkpoint import Checkpoint, assemble
from engine.models.config import ModelConfig, ModelError
from engine.models.gguf import Gguf
from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.safetensors import Folder
from engine.store.sources import resolve
from engine.worker.load_text import Text, folder_text, gguf_text
from engine.worker.loaded import Loaded
from ipc.errors import Code, EngineError

TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_SHARE: Final = 0.25  # of the free memory, for the KV blocks of all replicas of a deployment
CUDA_SHARE: Final = 0.85  # of what is free on the device after warm-up


def load_llm(deployment: Deployment, cache_dir: str, enter: Callable[[str], None]) -> Loaded:
    """Load, build and warm up. `enter` is told the phases loading and warming. Raises ModelError naming the file."""
    enter("loading")
    path = resolve(deployment.model, Path(cache_dir))
    device = choose_device(deployment.devices)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // deployment.replicas))
    checkpoint, text = open_model(path)
    config, llm = checkpoint.config, deployment.llm
    if llm.max_model_len > config.context:
        why = f"max_model_len {llm.max_model_len} is over the model's context of {config.context}"
        raise ModelError(str(path), why)
    if text.tokenizer.vocab_size > config.vocab_size:
        why = f"its tokenizer has {text.tokenizer.vocab_size} tokens, its embedding {config.vocab_size} rows"
        raise ModelError(str(path), why)
    dtype = choose_dtype(llm.dtype, device, checkpoint.is_bf16)
    kv_dtype = TYPES[llm.kv_dtype] if llm.kv_dtype != "auto" else dtype
    decoder = assemble(checkpoint, device, dtype, llm.max_model_len)
    num_blocks = llm.num_blocks or free_blocks(config, llm, kv_dtype, device, deployment.replicas)
    decoder.make_cache(num_blocks * llm.block_size, kv_dtype)
    runner = ModelRunner(decoder, llm.block_size, llm.max_num_seqs, text.tokenizer.vocab_size)
    enter("warming")
    is_exact = runner.warm(llm.max_batched_tokens)
    if not is_exact and llm.deterministic == "require":
        raise ModelError(str(path), "deterministic is 'require', and this machine's products are not row-exact")
    template = (
        ChatTemplate(text.template, text.tokenizer.control_tokens, text.tokenizer.names) if text.template else None
    )
    return Loaded(
        runner,
        text.tokenizer,
        version(path, f"{dtype}-{kv_dtype}"),
        template,
        is_exact,
        num_blocks=num_blocks,
        device=str(device),
        defaults=sampling_defaults(deployment.defaults, text.defaults),
        has_reasoning=llm.reasoning == "think" or (llm.reasoning == "auto" and OPEN in text.template),
    )


def sampling_defaults(configured: Defaults, told: dict[str, float]) -> dict[str, float]:
    """What a request gets that leaves a field to the model: as configured, or else as the model's files say."""
    values = {name: getattr(configured, name) for name in Defaults.__struct_fields__}
    return {**told, **{name: value for name, value in values.items() if value != -1}}


def open_model(path: Path) -> tuple[Checkpoint, Text]:
    """A model's weights and its text side, from a GGUF file or a Hugging Face folder. Raises ModelError."""
    if path.is_dir():
        folder = Folder(path)
        return folder, folder_text(folder)
    file = Gguf(path)
    return GgufCheckpoint(file), gguf_text(file)


def choose_device(wanted: str) -> torch.device:
    """auto is the first GPU that torch can use, else the CPU. Raises EngineError for a GPU that is not there."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda:0" if wanted == "auto" else wanted)
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        message = f"{wanted} is not there; torch sees {torch.cuda.device_count()} GPUs"
        raise EngineError(Code.INVALID, message, "devices")
    return device


def choose_dtype(wanted: str, device: torch.device, is_bf16: bool) -> torch.dtype:
    """fp32 on the CPU; on a GPU bf16, or fp16 where the weights allow it and the GPU has no bf16."""
    if device.type == "cpu":
        if wanted not in {"auto", "fp32"}:
            raise EngineError(Code.INVALID, f"{wanted} is for GPUs; the CPU computes in fp32", "dtype")
        return torch.float32
    if wanted != "auto":
        return TYPES[wanted]
    if torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32 if is_bf16 else torch.float16


def free_blocks(config: ModelConfig, llm: Llm, kv_dtype: torch.dtype, device: torch.device, replicas: int) -> int:
    """KV blocks for the memory there is, at most what all seats can use. Raises EngineError when one sequence has no
    room."""
    size = llm.block_size
    block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_size * kv_dtype.itemsize * size
    if device.type == "cpu":
        budget = int(available_bytes() * MEMORY_SHARE) // replicas
    else:
        budget = int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    longest = -(-llm.max_model_len // size)
    num_blocks = min(budget // block_bytes, longest * llm.max_num_seqs)
    if num_blocks < longest:
        message = (
            f"{llm.max_model_len} tokens of KV cache take {longest * block_bytes / 2**20:.0f} MiB, "
            f"and {budget / 2**20:.0f} MiB are free for them"
        )
        raise EngineError(Code.INVALID, message, "max_model_len")
    return num_blocks


def available_bytes() -> int:
    """MemAvailable, or what is left under the memory limit of this process's cgroup, if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup of version 2, or no limit ("max")
        return free


def version(path: Path, types: str) -> str:
    """What cached blocks belong to: the model's files, by name, size and time of change, and the types computed in."""
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    seen = [(each.name, stat.st_size, stat.st_mtime_ns) for each in files if (stat := each.stat())]
    digest = blake2b(repr((seen, types)).encode(), digest_size=6).hexdigest()
    return f"{path.name[:40]}-{digest}"
