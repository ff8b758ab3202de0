"""Owns the rendering of messages by a model's own chat template, and that no client text becomes a control token.

Knows no model. Jinja2 in its immutable sandbox; sizes are capped before and after. Called by the worker's loop.

Control tokens in client text are broken by a sentinel before rendering. The rendered text is then split at the
template's own control tokens, the sentinel is removed, and each piece is encoded as text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ipc.errors import Code, EngineError

RENDERED_MAX: Final = 4 * 1024 * 1024
TAIL: Final = 64  # characters of a rendered prompt
# Noncharacters: no text has them, and if a client's does, the next one is taken.
SENTINELS: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ChatTemplate:
    """One model's template and the control tokens it may write. Raises EngineError `invalid` when it cannot be read."""

    def __init__(self, source: str, control_tokens: dict[str, int], names: dict[str, str] | None = None) -> None:
        """`names` are the bos_token and the eos_token, which a template writes by these names."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise EngineError(Code.INVALID, f"the model's chat template is broken: {error}", "model") from error
        self._control_tokens = control_tokens
        self._names = {"bos_token": "", "eos_token": "", **(names or {})}
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def ids(
        self,
        messages: list[dict[str, str]],
        encode: Callable[[str, bool], list[int]],
        arguments: Mapping[str, object] | None = None,
    ) -> tuple[list[int], str]:
        """The prompt of a conversation, ready to be answered, and its last characters. `arguments` are told to the
        template beside the messages. Raises EngineError `invalid` naming `messages`."""
        sentinel = self._sentinel(messages)
        safe = [{key: self._broken(text, sentinel) for key, text in each.items()} for each in messages]
        try:
            told = {**self._broken_arguments(arguments or {}, sentinel), **self._names}
            rendered = self._template.render({**told, "messages": safe, "add_generation_prompt": True})
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise EngineError(Code.INVALID, f"the chat template refuses them: {error}", "messages") from error
        if len(rendered) > RENDERED_MAX:
            raise EngineError(Code.TOO_LARGE, f"rendered they have {len(rendered)} characters", "messages")
        ids: list[int] = []
        at = 0
        for found in self._controls.finditer(rendered) if self._controls is not None else ():
            if at < found.start():
                ids += encode(rendered[at : found.start()].replace(sentinel, ""), at == 0)
            ids.append(self._control_tokens[found[0]])
            at = found.end()
        if at < len(rendered):
            ids += encode(rendered[at:].replace(sentinel, ""), at == 0)
        return ids, rendered[-TAIL:]

    def _broken_arguments(self, arguments: Mapping[str, object], sentinel: str) -> dict[str, object]:
        return {
            name: self._broken(value, sentinel) if isinstance(value, str) else value
            for name, value in arguments.items()
        }

    @staticmethod
    def _sentinel(messages: list[dict[str, str]]) -> str:
        for sentinel in SENTINELS:
            if not any(sentinel in text for each in messages for text in each.values()):
                return sentinel
        raise EngineError(Code.INVALID, "they use every Unicode noncharacter there is", "messages")

    def _broken(self, text: str, sentinel: str) -> str:
        """The text with each control token in it broken after its first character, also where they overlap."""
        if self._controls is None:
            return text
        at = 0
        while (found := self._controls.search(text, at)) is not None:
            at = found.start() + 2
            text = text[: found.start() + 1] + sentinel + text[found.start() + 1 :]
        return text


def _raise(message: str) -> None:
    raise TemplateError(message)
