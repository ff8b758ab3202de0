"""Owns the HTTP handlers: bodies in, events of the native client out, as JSON or server-sent events.

Knows the native client and no worker. A request ends when its client goes away. What is wrong with a request is told as
a 4xx with the field's name; nothing a client sends makes a 5xx.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from engine.clock import stamp
from engine.config import Http
from engine.gateway import openai
from engine.gateway.keys import Key, Keyring, class_within
from ipc.errors import HTTP_STATUS, RETRYABLE, Code, EngineError
from ipc.messages import (
    FINAL,
    Counts,
    Delta,
    Echo,
    Ended,
    Event,
    Finished,
    StatusReport,
    TokenIds,
    Tokenize,
    TokenLogprob,
    Usage,
)
from ipc.session import AsyncClient
from ipc.streams import Completion, Options, raise_unless_finished

log = structlog.get_logger("gateway")

POLL_S: Final = 0.2
STALE_S: Final = 1.0  # a snapshot older than this says nothing
LIVE_S: Final = 5.0  # a front that has not answered for so long does not run
COUNT_S: Final = 1.0
ID_MAX: Final = 128
OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/startupz", "/health"})
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": waiting\n\n"
SSE_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
# What is too large in tokens is the request's own fault, what is too large in bytes the body's.
TOKEN_FIELDS: Final = frozenset({"prompt", "messages", "max_tokens", "n"})

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TokenizeRequest(msgspec.Struct, frozen=True):
    """POST /tokenize: a prompt or messages."""

    model: str
    prompt: str | None = None
    messages: list[openai.ChatMessage] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    model: str
    tokens: TokenIds


def status_of(error: EngineError) -> int:
    """The HTTP status of a refusal."""
    if error.code is Code.TOO_LARGE and error.field in TOKEN_FIELDS:
        return 400
    return HTTP_STATUS[error.code]


def error_body(error: EngineError, status: int) -> dict[str, Any]:
    """The OpenAI error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code: str = error.code.value
    if error.code is Code.TOO_LARGE and error.field == "prompt":
        code = "context_length_exceeded"
    if error.code is Code.NOT_FOUND and error.field == "route":
        code = "model_not_found"
    param = {"route": "model"}.get(error.field, error.field) or None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def clean_id(given: str | None) -> str:
    """A client's request id, if it is short and plain; else a new one."""
    if given is not None and re.fullmatch(rf"[A-Za-z0-9._:/@+=-]{{1,{ID_MAX}}}", given):
        return given
    return uuid.uuid4().hex


class Door:
    """The handlers of one gateway, on one session with the front."""

    def __init__(self, client: AsyncClient, config: Http, keyring: Keyring) -> None:
        self._client = client
        self._config = config
        self._keyring = keyring
        self._status: StatusReport | None = None
        self._seen_at = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._was_ready = False

    def application(self) -> web.Application:
        """The routes. Every one but health is guarded."""
        made = web.Application(client_max_size=self._config.body_bytes_max, middlewares=[self._around])
        made.on_response_prepare.append(_sign)
        made.router.add_get("/livez", self._livez)
        made.router.add_get("/readyz", self._readyz)
        made.router.add_get("/startupz", self._startupz)
        made.router.add_get("/health", self._readyz)
        made.router.add_get("/metrics", self._metrics)
        made.router.add_get("/v1/models", self._models)
        made.router.add_get("/v1/models/{id:.+}", self._model)
        made.router.add_post("/v1/chat/completions", self._chat)
        made.router.add_post("/v1/completions", self._complete)
        made.router.add_post("/tokenize", self._tokenize)
        made.router.add_post("/detokenize", self._detokenize)
        return made

    # Around every request.

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Key, errors, request id, one line of log."""
        started = time.monotonic()
        request["id"] = name = clean_id(request.headers.get("x-request-id"))
        status = 500
        try:
            response = await self._guarded(request, handler)
            status = response.status
            if not response.prepared:
                response.headers["x-request-id"] = name
            return response
        except web.HTTPException as error:
            status = error.status
            refusal = EngineError(_code(status), error.reason, "body" if status == 413 else "")
            return self._refused(request, refusal, status, dict(error.headers))
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            route = request.match_info.route.resource
            path = route.canonical if route is not None else "other"
            self._counts[f"{path} {status}"] += 1
            took_ms = round((time.monotonic() - started) * 1e3, 1)
            log.info("http", method=request.method, path=path, status=status, took_ms=took_ms, request=name)

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            values = request.headers.getall("Authorization", [])
            key = self._keyring.find([each.encode("utf-8", "surrogateescape") for each in values])
            if key is None:
                return self._refused(request, EngineError(Code.DENIED, "a valid API key is needed"), 401)
            request["key"] = key
        try:
            return await handler(request)
        except EngineError as error:
            return self._refused(request, error, status_of(error))
        except ConnectionResetError:
            raise asyncio.CancelledError from None
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception:  # the boundary around one HTTP handler
            log.exception("http_handler_failed", request=request["id"])
            return self._refused(request, EngineError(Code.INTERNAL, "a fault of this engine"), 500)

    def _refused(
        self, request: web.Request, error: EngineError, status: int, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        told = {key: value for key, value in (headers or {}).items() if key.lower() == "allow"}
        told["x-request-id"] = request["id"]
        if error.code in RETRYABLE:
            wait_s = error.retry_after_s or 1.0
            told |= {"Retry-After": str(max(1, round(wait_s))), "retry-after-ms": str(round(wait_s * 1e3))}
        else:
            told["x-should-retry"] = "false"
        if status == 401:
            told["WWW-Authenticate"] = "Bearer"
        body = error_body(error, status)
        if status == 401:
            body["error"] |= {"code": "invalid_api_key"}
        return _json(body, status, told)

    # Health: from a snapshot, never through a queue.

    async def watch(self) -> None:
        """Keep the snapshot fresh, and tell the front what was answered. Runs until it is cancelled."""
        counted_at = 0.0
        while True:
            try:
                self._status = await self._client.status()
                self._seen_at = time.monotonic()
                self._was_ready = self._was_ready or self._is_ready()
                if self._counts and time.monotonic() - counted_at >= COUNT_S:
                    counts, self._counts, counted_at = self._counts, Counter(), time.monotonic()
                    self._client.count(Counts(dict(counts.most_common(1024))))
            except EngineError:
                self._status = None
            await asyncio.sleep(POLL_S)

    def _is_ready(self) -> bool:
        status = self._status
        if status is None or time.monotonic() - self._seen_at > STALE_S or status.state == "draining":
            return False
        return any(route.is_ready for route in status.routes)

    def _health(self, is_good: bool) -> web.Response:
        state = self._status.state if self._status is not None else "unreachable"
        return _json({"status": "ok" if is_good else "unavailable", "engine": state}, 200 if is_good else 503)

    async def _livez(self, _: web.Request) -> web.Response:
        """Whether the loop of the front turns; nothing about workers, which the supervisor restarts by itself."""
        return self._health(time.monotonic() - self._seen_at <= LIVE_S)

    async def _readyz(self, _: web.Request) -> web.Response:
        return self._health(self._is_ready())

    async def _startupz(self, _: web.Request) -> web.Response:
        return self._health(self._was_ready)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await self._client.metrics()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # Models.

    async def _listed(self) -> list[dict[str, Any]]:
        return [
            {
                "id": each.route,
                "object": "model",
                "created": 0,
                "owned_by": "engine",
                "max_model_len": each.max_model_len,
                "ready": each.is_ready,
            }
            for each in await self._client.models()
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": await self._listed()})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        for each in await self._listed():
            if each["id"] == name:
                return _json(each)
        raise EngineError(Code.NOT_FOUND, f"no route {name[:64]}", "route")

    # Tokens.

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await self._body(request, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise openai.invalid("prompt", "one of prompt and messages is needed")
        messages = [openai.message(index, each) for index, each in enumerate(asked.messages or [])]
        question = Tokenize(asked.prompt or "", messages, None, asked.add_special_tokens, asked.parse_special)
        told = await self._client.tokenize(_route(asked.model), question)
        return _json({"count": len(told.ids), "max_model_len": told.max_model_len, "tokens": told.ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = await self._body(request, DetokenizeRequest)
        told = await self._client.tokenize(_route(asked.model), Tokenize(ids=asked.tokens))
        return _json({"prompt": told.text})

    # Completions.

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        """A JSON body as `kind`. Raises EngineError naming the field, HTTPException for a body that is too large."""
        if request.content_length is not None and request.content_length > self._config.body_bytes_max:
            raise web.HTTPRequestEntityTooLarge(self._config.body_bytes_max, request.content_length)
        if request.content_type not in {"application/json", "application/octet-stream"}:
            raise web.HTTPUnsupportedMediaType(reason="the body must be application/json")
        try:
            async with asyncio.timeout(self._config.read_s):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason="the body did not arrive in time") from None
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _explained(error) from error

    def _ask(self, request: web.Request, asked: openai.Common, made: Options) -> Options:
        """What the key says of a request."""
        key: Key = request["key"]
        made["tenant"] = key.tenant
        made["priority"] = class_within(made.get("priority", ""), key.ceiling)
        trace = request.headers.get("traceparent", "")
        if re.fullmatch(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", trace):
            made["traceparent"] = trace
        return made

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, openai.ChatRequest)
        route, made = _route(asked.model), self._ask(request, asked, openai.chat_options(asked))
        name, created = f"chatcmpl-{uuid.uuid4().hex}", stamp()
        if asked.stream:
            shape = ChatShape(name, created, asked)
            return await self._stream(request, shape, [await self._client.stream(route, "", **made)])
        answer = await self._client.generate(route, "", **made)
        choices = [openai.chat_choice(index, each, bool(asked.logprobs)) for index, each in enumerate(answer.choices)]
        return _json(_whole("chat.completion", name, created, asked.model, choices, openai.usage(answer.usage)))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, openai.CompletionRequest)
        prompts = openai.completion_prompts(asked)
        route, made = _route(asked.model), self._ask(request, asked, openai.completion_options(asked))
        name, created = f"cmpl-{uuid.uuid4().hex}", stamp()
        if asked.stream:
            shape = PlainShape(name, created, asked)
            streams = [await self._client.stream(route, prompt, **made) for prompt in prompts]
            return await self._stream(request, shape, streams)
        answers = await self._all(route, prompts, made)
        num_choices = asked.n or 1
        choices = [
            openai.plain_choice(number * num_choices + index, choice, answer, asked.logprobs)
            for number, answer in enumerate(answers)
            for index, choice in enumerate(answer.choices)
        ]
        told = openai.usage(openai.total([answer.usage for answer in answers]))
        return _json(_whole("text_completion", name, created, asked.model, choices, told))

    async def _all(self, route: str, prompts: list[str | list[int]], made: Options) -> list[Completion]:
        """Every prompt's answer; when one fails the others are cancelled, and its error is told."""
        tasks = [asyncio.ensure_future(self._client.generate(route, prompt, **made)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(self, request: web.Request, shape: "Shape", streams: list[Any]) -> web.StreamResponse:
        """Server-sent events. An error before the first token is an ordinary refusal; later it is an event."""
        merged = _merge(streams)
        response = web.StreamResponse(headers={**SSE_HEADERS, "x-request-id": request["id"]})
        try:
            pending = asyncio.ensure_future(anext(merged, None))
            await asyncio.wait([pending], timeout=self._config.keepalive_s)
            if pending.done() and (first := pending.result()) is not None and isinstance(first[1], FINAL):
                raise_unless_finished(first[1])
            await response.prepare(request)
            await self._write_events(response, shape, merged, pending)
            await response.write_eof()
        finally:
            for stream in streams:
                stream.cancel()
        return response

    async def _write_events(
        self, response: web.StreamResponse, shape: "Shape", merged: AsyncIterator[tuple[int, Event]], pending: Any
    ) -> None:
        await self._write(response, shape.start())
        while True:
            while not pending.done():
                await asyncio.wait([pending], timeout=self._config.keepalive_s)
                if not pending.done():
                    await self._write(response, PING)
            found = pending.result()
            if found is None:
                break
            number, event = found
            if isinstance(event, FINAL) and not isinstance(event, Finished):
                try:
                    raise_unless_finished(event)
                except EngineError as error:
                    await self._write(response, _event(error_body(error, status_of(error))))
                    return
            await self._write(response, shape.events(number, event))
            pending = asyncio.ensure_future(anext(merged, None))
        await self._write(response, shape.finish() + DONE)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """A client that reads nothing for `write_s` is cut."""
        if data:
            async with asyncio.timeout(self._config.write_s):
                await response.write(data)


async def _merge(streams: list[Any]) -> AsyncIterator[tuple[int, Event]]:
    """Events of several requests as they come; ends after the last final one, or the first that is no Finished."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                event = task.result()
                yield number, event
                if not isinstance(event, FINAL):
                    waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for task in waiting:
            task.cancel()


class Shape:
    """How the events of a stream look. `usages` are those of the requests that have finished."""

    kind = ""

    def __init__(self, name: str, created: int, asked: openai.Common) -> None:
        self._head = {"id": name, "object": self.kind, "created": created, "model": asked.model}
        told = asked.stream_options
        self._has_usage = told is not None and told.include_usage
        self._is_continuous = told is not None and told.continuous_usage_stats
        self._num_choices = asked.n or 1
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self._usages: list[Usage] = []

    def start(self) -> bytes:
        return b""

    def events(self, number: int, event: Event) -> bytes:
        """What one native event of prompt `number` becomes."""
        if isinstance(event, Delta) and event.prompt_tokens:
            self._prompt_tokens[number] = event.prompt_tokens
        if isinstance(event, Delta | Ended | Finished):
            self._completion_tokens += len(event.ids)
        if isinstance(event, Finished):
            self._usages.append(event.usage)
            self._prompt_tokens[number] = event.usage.prompt_tokens
        made = b""
        index = number * self._num_choices
        if isinstance(event, Echo):
            made = self._chunk(index, event.text, event.logprobs)
        elif isinstance(event, Delta):
            made = self._chunk(index + event.choice, event.text, event.logprobs)
        elif isinstance(event, Ended):
            made = self._chunk(index + event.choice, event.text, event.logprobs)
            made += self._end(index + event.choice, event.reason)
        elif isinstance(event, Finished) and self._num_choices == 1:
            made = self._chunk(index, event.text, event.logprobs) + self._end(index, event.reason)
        return made

    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob]) -> bytes:
        raise NotImplementedError

    def _end(self, index: int, reason: str) -> bytes:
        raise NotImplementedError

    def _event(self, choice: dict[str, Any]) -> bytes:
        told = {**self._head, "choices": [choice]}
        if self._is_continuous:
            prompt_tokens = sum(self._prompt_tokens.values())
            told["usage"] = openai.usage(Usage(prompt_tokens, self._completion_tokens, 0))
        elif self._has_usage:
            told["usage"] = None
        return _event(told)

    def finish(self) -> bytes:
        """The last event, where usage was asked for."""
        if not self._has_usage:
            return b""
        return _event({**self._head, "choices": [], "usage": openai.usage(openai.total(self._usages))})


class ChatShape(Shape):
    """chat.completion.chunk."""

    kind = "chat.completion.chunk"

    def __init__(self, name: str, created: int, asked: openai.ChatRequest) -> None:
        super().__init__(name, created, asked)
        self._has_logprobs = bool(asked.logprobs)

    def _choice(self, index: int, delta: dict[str, str], reason: str | None, logprobs: Any = None) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def start(self) -> bytes:
        return b"".join(
            self._choice(index, {"role": "assistant", "content": ""}, None) for index in range(self._num_choices)
        )

    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob]) -> bytes:
        if not text and not logprobs:
            return b""
        told = openai.chat_logprobs(logprobs) if self._has_logprobs else None
        return self._choice(index, {"content": text}, None, told)

    def _end(self, index: int, reason: str) -> bytes:
        return self._choice(index, {}, reason)


class PlainShape(Shape):
    """text_completion."""

    kind = "text_completion"

    def __init__(self, name: str, created: int, asked: openai.CompletionRequest) -> None:
        super().__init__(name, created, asked)
        self._num_top = asked.logprobs
        self._offsets: Counter[int] = Counter()

    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob]) -> bytes:
        if not text and not logprobs:
            return b""
        told = None
        if self._num_top is not None:
            told = openai.plain_logprobs(logprobs, self._num_top, self._offsets[index])
        self._offsets[index] += len(text)
        return self._event({"index": index, "text": text, "logprobs": told, "finish_reason": None})

    def _end(self, index: int, reason: str) -> bytes:
        return self._event({"index": index, "text": "", "logprobs": None, "finish_reason": reason})


def _on_malformed(
    handler: RequestHandler,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
) -> web.StreamResponse:
    """What the HTTP parser refuses, before there is a request: told in JSON, logged without the client's bytes."""
    log.info("http_malformed", status=status, reason=type(exc).__name__)
    if request.writer.output_size > 0:
        raise ConnectionError("the answer has begun")
    what = "the engine failed" if status >= 500 else "the request is no well-formed HTTP"
    answer = _json(error_body(EngineError(_code(status), what), status), status, {"Server": "engine"})
    answer.force_close()
    return answer


def tell_malformed_in_json() -> None:
    """aiohttp answers those in plain text, with its version, and logs their bytes; there is no setting for it."""
    RequestHandler.handle_error = _on_malformed  # type: ignore[method-assign, assignment]


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "engine"


def _route(model: str) -> str:
    """A model's name as a route. Raises EngineError when it cannot be one."""
    if not 1 <= len(model) <= 64:
        raise EngineError(Code.NOT_FOUND, f"no model {model[:64]!r}", "route")
    return model


def _whole(
    kind: str, name: str, created: int, model: str, choices: list[dict[str, Any]], told: dict[str, Any]
) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": created, "model": model, "choices": choices, "usage": told}


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    told = {"Content-Type": "application/json", **(headers or {})}
    return web.Response(body=msgspec.json.encode(value), status=status, headers=told)


def _explained(error: Exception) -> EngineError:
    """What is wrong with a body, by field."""
    if isinstance(error, RecursionError):
        return openai.invalid("", "the body is nested too deeply")
    text, _, path = str(error).replace("at `key` in `$", "at `$").partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if not field and isinstance(error, msgspec.ValidationError) and "`" in text and "field" in text:
        field = text.split("`")[1]
    return openai.invalid(field, text)


def _code(status: int) -> Code:
    if status == 404:
        return Code.NOT_FOUND
    return Code.TOO_LARGE if status == 413 else Code.INVALID if status < 500 else Code.INTERNAL
