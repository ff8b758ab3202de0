"""Owns the text side of a model's files: vocabulary, what ends a text, chat template.

Knows no weights. Called by `worker/load_llm.py` and by the export of a model.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from engine.llm.text_tokenizer import TextTokenizer
from engine.llm.vocabulary import Lists, Settings, from_json, from_lists
from engine.models.config import ModelError
from engine.models.gguf import Gguf
from engine.models.safetensors import JSON_BYTES_MAX, Folder, read_json

END_OF_TURN: Final = "tokenizer.ggml.eot_token_id"  # some files name a second id that ends an answer


@dataclass(slots=True)
class Text:
    """A model's tokenizer and the source of its chat template, "" where there is none."""

    tokenizer: TextTokenizer
    template: str
    defaults: dict[str, float] = field(default_factory=dict)  # how the model wants to be sampled, by field


class _Generation(Struct, frozen=True):
    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None

    def defaults(self) -> dict[str, float]:
        """What is said about sampling. `do_sample` false alone says nothing: it is what files say that do not care."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class _TokenizerConfig(Struct, frozen=True):
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[dict[str, Any]] | None = None


def gguf_text(file: Gguf) -> Text:
    """From the metadata of a GGUF file. Raises ModelError."""
    key = "tokenizer.ggml"
    model = file.text(f"{key}.model")
    eos = {int(file.number(f"{key}.eos_token_id"))}
    if END_OF_TURN in file.metadata:
        eos.add(int(file.number(END_OF_TURN)))
    bos = file.metadata.get(f"{key}.bos_token_id")
    is_sentence_piece = model == "llama"
    lists = Lists(
        model,
        file.items(f"{key}.tokens", str),
        file.items(f"{key}.token_type", int),
        [] if is_sentence_piece else file.items(f"{key}.merges", str),
        file.items(f"{key}.scores", float) if is_sentence_piece else [],
        file.text(f"{key}.pre") or "gpt-2",
        frozenset(eos),
        None if bos is None else int(file.number(f"{key}.bos_token_id")),
        bool(file.metadata.get(f"{key}.add_bos_token", is_sentence_piece)),
        bool(file.metadata.get(f"{key}.add_space_prefix", True)),
    )
    try:
        return Text(from_lists(lists), file.text("tokenizer.chat_template"))
    except ValueError as error:
        raise ModelError(str(file.path), f"{error}") from None


def folder_text(folder: Folder) -> Text:
    """From tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja. Raises ModelError.

    What ends a text is the union of what config.json, generation_config.json and tokenizer_config.json say.
    """
    path = folder.path / "tokenizer.json"
    if not path.is_file():
        raise ModelError(str(path), "is missing")
    if path.stat().st_size > JSON_BYTES_MAX:
        raise ModelError(str(path), f"is oversized: over {JSON_BYTES_MAX} bytes")
    told, generation = _TokenizerConfig(), _Generation()
    if (folder.path / "tokenizer_config.json").is_file():
        told = read_json(folder.path / "tokenizer_config.json", _TokenizerConfig)
    if (folder.path / "generation_config.json").is_file():
        generation = read_json(folder.path / "generation_config.json", _Generation)
    settings = Settings(
        frozenset(_ids(generation.eos_token_id) | _ids(folder.raw.eos_token_id)),
        _token(told.bos_token),
        _token(told.eos_token),
        told.add_bos_token,
    )
    try:
        tokenizer = from_json(path.read_text(encoding="utf-8"), settings)
    except (ValueError, OSError) as error:
        raise ModelError(str(path), f"{error}") from None
    if not tokenizer.eos_ids:
        raise ModelError(folder.source, "nothing says which token ends a text (eos_token_id)")
    return Text(tokenizer, _template(folder, told), generation.defaults())


def _ids(value: int | list[int] | None) -> set[int]:
    return set(value) if isinstance(value, list) else (set() if value is None else {value})


def _token(value: str | dict[str, Any] | None) -> str:
    """A token's text; some files wrap it in a map."""
    return str(value.get("content", "")) if isinstance(value, dict) else value or ""


def _template(folder: Folder, told: _TokenizerConfig) -> str:
    """A file of its own comes first; of several named ones, the default."""
    file = folder.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = told.chat_template
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template}
        return str(named.get("default") or "")
    return template or ""
