"""Owns the way from a GENERATE to sequences: validation that needs the model, templates, tokens.

Knows no scheduler and no socket. Called by `worker/loop.py`; long texts are taken in on a thread, so that running
streams do not wait for a tokenizer. Every refusal names its field.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.llm.blocks import namespace_key
from engine.llm.detokenizer import Detokenizer
from engine.llm.reasoning import OPEN, Reasoning
from engine.llm.sequence import Sampling, Sequence
from engine.worker.live import Answer, Live
from engine.worker.loaded import Loaded
from ipc.errors import Code, EngineError
from ipc.messages import Ask, Assign, Generate, Message, Tokenize, Tokenized

# Sampling that a request may leave to the model, and what it is when that says nothing.
SAMPLED: Final = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
ASKS_MAX: Final = 64
LONG_TEXT: Final = 16 * 1024  # characters: about 5 ms of a tokenizer
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(slots=True)
class _Pending:
    assign: Assign
    future: "Future[Live]"


class Intake:
    """Takes requests in. `max_model_len` and `max_num_seqs` are the worker's limits."""

    def __init__(self, loaded: Loaded, max_model_len: int, max_num_seqs: int) -> None:
        self._loaded = loaded
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._pending: dict[int, _Pending] = {}
        self._asked: list[tuple[Ask, Future[Tokenized]]] = []

    def __len__(self) -> int:
        return len(self._pending) + len(self._asked)

    def take(self, assign: Assign, generate: Generate) -> Live | None:
        """The request, or None when it comes by `done` later. Raises EngineError naming the field."""
        prompt = generate.prompt
        size = len(prompt) if isinstance(prompt, str) else 0
        if size + sum(len(each.content) for each in generate.messages) < LONG_TEXT:
            return self._live(assign, generate)
        self._pending[assign.number] = _Pending(assign, self._executor.submit(self._live, assign, generate))
        return None

    def done(self) -> "Iterator[tuple[Assign, Future[Live]]]":
        """What the thread has finished since."""
        for number, pending in list(self._pending.items()):
            if pending.future.done():
                del self._pending[number]
                yield pending.assign, pending.future

    def withdraw(self, number: int, attempt: int) -> Assign | None:
        """Forget a request that is still being taken in."""
        pending = self._pending.get(number)
        if pending is None or pending.assign.attempt != attempt:
            return None
        del self._pending[number]
        pending.future.cancel()
        return pending.assign

    def ask(self, ask: Ask, asked: Tokenize) -> Tokenized | None:
        """The answer to a question, or None when it comes by `answered` later. Raises EngineError naming the field."""
        size = len(asked.text) + len(asked.ids or ()) + sum(len(each.content) for each in asked.messages)
        if size < LONG_TEXT:
            return self.tokenize(asked)
        if len(self._asked) >= ASKS_MAX:
            raise EngineError(Code.OVERLOADED, f"{ASKS_MAX} long texts wait to be tokenized", retry_after_s=1.0)
        self._asked.append((ask, self._executor.submit(self.tokenize, asked)))
        return None

    def answered(self) -> "Iterator[tuple[Ask, Future[Tokenized]]]":
        """Answers that the thread has finished since."""
        finished = [entry for entry in self._asked if entry[1].done()]
        self._asked = [entry for entry in self._asked if entry not in finished]
        yield from finished

    def tokenize(self, asked: Tokenize) -> Tokenized:
        """Ids of a text or a conversation, or the text of ids. Raises EngineError naming the field."""
        tokenizer = self._loaded.tokenizer
        if asked.ids is not None:
            tokenizer.check(asked.ids)
            text = b"".join(map(tokenizer.token_bytes, asked.ids)).decode(errors="replace")
            return Tokenized(asked.ids, text, self._max_model_len)
        if asked.messages:
            ids, _ = self._template_ids(asked.messages, asked.template_args)
        elif asked.add_special or asked.parse_special:
            ids = tokenizer.encode_prompt(asked.text, asked.parse_special)
        else:
            ids = tokenizer.encode(asked.text)
        return Tokenized(ids, asked.text, self._max_model_len)

    def _live(self, assign: Assign, generate: Generate) -> Live:
        generate = self._filled(generate)
        self._check(generate)
        tokenizer, prompt = self._loaded.tokenizer, generate.prompt
        prompt_ids, tail = self._prompt_ids(generate)
        text = ""
        if generate.echo:
            is_text = isinstance(prompt, str) and prompt
            text = str(prompt) if is_text else b"".join(map(tokenizer.token_bytes, prompt_ids)).decode(errors="replace")
        live = Live(assign.number, assign.attempt, assign.session, assign.request, generate.stream, generate.echo, text)
        for choice in range(generate.n):
            sequence = self._sequence(assign, generate, prompt_ids, choice)
            detokenizer = Detokenizer(tokenizer, tuple(generate.stop), min_ids=generate.min_tokens)
            answer = Answer(sequence, detokenizer)
            if generate.messages and generate.split_reasoning and self._loaded.has_reasoning:
                answer.reasoning = Reasoning(tail.rstrip().endswith(OPEN))
            live.answers.append(answer)
        return live

    def _filled(self, generate: Generate) -> Generate:
        """With the model's own values where the request leaves them to it."""
        missing = [name for name in SAMPLED if getattr(generate, name) is None]
        if not missing:
            return generate
        return msgspec.structs.replace(
            generate, **{name: self._loaded.defaults.get(name, SAMPLED[name]) for name in missing}
        )

    def _check(self, generate: Generate) -> None:
        """What no single field can say, and what only this model knows."""
        if generate.top_p == 0 and generate.temperature:
            raise EngineError(Code.INVALID, "top_p 0 leaves nothing to sample from", "top_p")
        max_tokens = generate.max_tokens
        if max_tokens is not None and generate.min_tokens > max_tokens:
            message = f"min_tokens is {generate.min_tokens}, over max_tokens, {max_tokens}"
            raise EngineError(Code.INVALID, message, "min_tokens")
        if max_tokens == 0 and not generate.echo:
            raise EngineError(Code.INVALID, "max_tokens 0 goes with echo alone", "max_tokens")
        if generate.n > self._max_num_seqs:
            raise EngineError(Code.TOO_LARGE, f"{generate.n} answers; a worker has {self._max_num_seqs} seats", "n")
        vocab_size = self._loaded.tokenizer.vocab_size
        for field, ids in (("logit_bias", generate.logit_bias), ("stop_ids", generate.stop_ids)):
            for id in ids:
                if id >= vocab_size:
                    raise EngineError(Code.INVALID, f"token id {id} is not in the vocabulary of {vocab_size}", field)
        if not self._loaded.has_logits:
            changed = {
                "logprobs": generate.logprobs is not None,
                "logit_bias": bool(generate.logit_bias),
                "repetition_penalty": generate.repetition_penalty != 1,
                "presence_penalty": generate.presence_penalty != 0,
                "frequency_penalty": generate.frequency_penalty != 0,
            }
            for field, is_asked in changed.items():
                if is_asked:
                    raise EngineError(Code.UNSUPPORTED, "the fake model has no logits", field)

    def _sequence(self, assign: Assign, generate: Generate, prompt_ids: list[int], choice: int) -> Sequence:
        max_tokens = generate.max_tokens
        return Sequence(
            request=assign.number,
            attempt=assign.attempt,
            token_ids=list(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            max_tokens=max(1, self._max_model_len - len(prompt_ids)) if max_tokens is None else max_tokens,
            min_tokens=generate.min_tokens,
            ignore_eos=generate.ignore_eos,
            stop_ids=frozenset(generate.stop_ids),
            eos_ids=self._loaded.tokenizer.eos_ids,
            seed=assign.seed,
            choice=choice,
            namespace=namespace_key(self._loaded.version, "", "", assign.tenant, generate.cache_salt),
            sampling=_sampling(generate),
            num_logprobs=generate.logprobs,
            is_scored=generate.echo and generate.logprobs is not None and choice == 0,
        )

    def _prompt_ids(self, generate: Generate) -> tuple[list[int], str]:
        """The prompt, or the conversation by the model's template and how that ends."""
        tokenizer, prompt = self._loaded.tokenizer, generate.prompt
        if generate.messages:
            if prompt:
                raise EngineError(Code.INVALID, "prompt and messages exclude each other", "messages")
            return self._template_ids(generate.messages, generate.template_args)
        if isinstance(prompt, str):
            return tokenizer.encode_prompt(prompt, generate.parse_special), ""
        tokenizer.check(prompt)
        return prompt, ""

    def _template_ids(self, messages: list[Message], arguments: Mapping[str, object]) -> tuple[list[int], str]:
        template = self._loaded.template
        if template is None:
            raise EngineError(Code.INVALID, "this model has no chat template; send a prompt", "messages")
        turns = []
        for index, each in enumerate(messages):
            if each.role not in ROLES:
                message = f"there is no role {each.role[:64]!r}; there are {', '.join(ROLES)}"
                raise EngineError(Code.INVALID, message, f"messages[{index}].role")
            turns.append({"role": ROLES[each.role], "content": each.content})
        return template.ids(turns, self._loaded.tokenizer.encode, arguments)


def _sampling(generate: Generate) -> Sampling | None:
    """None where the likeliest token is always taken, with nothing changed."""
    bias = tuple(sorted(generate.logit_bias.items()))
    sampling = Sampling(
        generate.temperature or 0.0,
        max(0, generate.top_k or 0),
        generate.top_p or 1.0,
        generate.min_p or 0.0,
        generate.repetition_penalty or 1.0,
        generate.presence_penalty,
        generate.frequency_penalty,
        bias,
    )
    is_plain = sampling.repetition_penalty == 1 and not (
        sampling.presence_penalty or sampling.frequency_penalty or bias
    )
    return None if is_plain and not generate.temperature else sampling
