"""Owns what loading gives to the loop. Knows nothing else; imports neither torch nor a template engine by itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.llm.runner import Runner
from engine.llm.tokenizer import Tokenizer


class Template(Protocol):
    """A chat template: `engine.llm.template.ChatTemplate` where there is one."""

    def ids(
        self,
        messages: list[dict[str, str]],
        encode: Callable[[str, bool], list[int]],
        arguments: Mapping[str, object] | None = None,
    ) -> tuple[list[int], str]: ...


@dataclass(slots=True)
class Loaded:
    """A runner that is warmed up, its tokenizer, and the name of what it serves.

    `overlap` steps may be in flight; `num_blocks` is what there was room for; `device` is where it runs.
    """

    runner: Runner
    tokenizer: Tokenizer
    version: str
    template: Template | None = None
    is_row_exact: bool = True
    overlap: int = 1
    has_logits: bool = True
    num_blocks: int = 0
    device: str = "cpu"
    defaults: dict[str, float] = field(default_factory=dict)  # sampling, for fields that a request leaves to the model
    has_reasoning: bool = False
