"""Owns the HTTP handlers: bodies in, events of the native client out, as JSON or server-sent events.

Knows the native client and no worker. A request ends when its client goes away. What is wrong with a request is told as
a 4xx with the field's name; nothing a client sends makes a 5xx.
"""

import asyncio
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from engine.clock import stamp
from engine.config import Http
from engine.gateway import openai, responses
from engine.gateway.keyring import Keyring
from engine.gateway.openapi import ENDPOINTS, document
from engine.gateway.reply import code_of, error_body, explained, invalid, status_of
from engine.gateway.shapes import ChatShape, PlainShape
from engine.gateway.streaming import Streams
from engine.keys import Key, class_within
from engine.telemetry import Lines
from ipc.errors import RETRYABLE, Code, EngineError
from ipc.messages import FINAL, Counts, StatusReport, Tokenize
from ipc.session import AsyncClient
from ipc.streams import AsyncSink, Completion, Options, Stored, raise_unless_finished

log = structlog.get_logger("gateway")

POLL_S: Final = 0.2
STALE_S: Final = 1.0  # a snapshot older than this says nothing
LIVE_S: Final = 5.0  # a front that has not answered for so long does not run
COUNT_S: Final = 1.0
ID_MAX: Final = 128
QUIET_PATHS: Final = frozenset({"/metrics", *(each.path for each in ENDPOINTS if each.is_health)})
OPEN_PATHS: Final = frozenset(each.path for each in ENDPOINTS if each.is_open)

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _unique() -> str:
    """A name for an answer. Not a secret: what can be fetched by its name has one of `uuid4`."""
    return f"{random.getrandbits(128):032x}"


def clean_id(given: str | None) -> str:
    """A client's request id, if it is short and plain; else a new one."""
    if given is not None and re.fullmatch(rf"[A-Za-z0-9._:/@+=-]{{1,{ID_MAX}}}", given):
        return given
    return _unique()


class Door:
    """The handlers of one gateway, on one session with the front."""

    def __init__(self, client: AsyncClient, config: Http, keyring: Keyring, access: Lines) -> None:
        self._client = client
        self._config = config
        self._keyring = keyring
        self._access = access
        self.streams = Streams(client, config)
        self._status: StatusReport | None = None
        self._seen_at = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._was_ready = False

    def application(self) -> web.Application:
        """The routes. Every one but health is guarded."""
        made = web.Application(client_max_size=self._config.body_bytes_max, middlewares=[self._around])
        made.on_response_prepare.append(_sign)
        for each in ENDPOINTS:
            path = each.path.replace("/v1/models/{id}", "/v1/models/{id:.+}")  # a name may have slashes
            add = made.router.add_get if each.method == "get" else partial(made.router.add_route, each.method)
            add(path, getattr(self, f"_{each.name}"))  # with GET comes HEAD
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
            refusal = EngineError(code_of(status), error.reason, "body" if status == 413 else "")
            return self._refused(request, refusal, status, dict(error.headers))
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            self._note(request, status, time.monotonic() - started)

    def _note(self, request: web.Request, status: int, took_s: float) -> None:
        """Count it, and write its line; probes and scrapes have none below level debug."""
        route = request.match_info.route.resource
        path = route.canonical if route is not None else "other"
        self._counts[f"{path} {status}"] += 1
        if path not in QUIET_PATHS or self._access.is_debug:
            told = {"tokens": request["tokens"]} if "tokens" in request else {}
            method, took_ms, name = request.method, round(took_s * 1e3, 1), request["id"]
            self._access.add(method=method, path=path, status=status, took_ms=took_ms, request=name, **told)

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
        return as_json(body, status, told)

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

    def _told(self, is_good: bool) -> web.Response:
        state = self._status.state if self._status is not None else "unreachable"
        return as_json({"status": "ok" if is_good else "unavailable", "engine": state}, 200 if is_good else 503)

    async def _livez(self, _: web.Request) -> web.Response:
        """Whether the loop of the front turns; nothing about workers, which the supervisor restarts by itself."""
        return self._told(time.monotonic() - self._seen_at <= LIVE_S)

    async def _readyz(self, _: web.Request) -> web.Response:
        return self._told(self._is_ready())

    async def _health(self, _: web.Request) -> web.Response:
        return self._told(self._is_ready())

    async def _startupz(self, _: web.Request) -> web.Response:
        return self._told(self._was_ready)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await self._client.metrics()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _openapi(self, _: web.Request) -> web.Response:
        return as_json(document(self._keyring.has_keys))

    # Models.

    async def _listed(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "engine",
                "root": each.route,
                "max_model_len": each.max_model_len,
                "ready": each.is_ready,
            }
            for each in await self._client.models()
            for name in (each.route, *each.aliases)
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return as_json({"object": "list", "data": await self._listed()})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        for each in await self._listed():
            if each["id"] == name:
                return as_json(each)
        raise EngineError(Code.NOT_FOUND, f"no route {name[:64]}", "route")

    # Tokens.

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await self._body(request, openai.TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("prompt", "one of prompt and messages is needed")
        messages = [openai.message(index, each) for index, each in enumerate(asked.messages or [])]
        arguments = asked.chat_template_kwargs or {}
        text = asked.prompt or ""
        question = Tokenize(text, messages, None, asked.add_special_tokens, asked.parse_special, arguments)
        told = await self._client.tokenize(_route(asked.model), question)
        return as_json({"count": len(told.ids), "max_model_len": told.max_model_len, "tokens": told.ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = await self._body(request, openai.DetokenizeRequest)
        told = await self._client.tokenize(_route(asked.model), Tokenize(ids=asked.tokens))
        return as_json({"prompt": told.text})

    # Completions.

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        """A JSON body as `kind`. Raises EngineError naming the field, HTTPException for a body that is too large."""
        if request.content_length is not None and request.content_length > self._config.body_bytes_max:
            raise web.HTTPRequestEntityTooLarge(self._config.body_bytes_max, request.content_length)
        if request.content_type != "application/json":  # a page of another origin cannot say that without being asked
            raise web.HTTPUnsupportedMediaType(reason="the body must be application/json")
        try:
            if request.content.is_eof():  # it came with the head: nothing to wait for
                body = await request.read()
            else:
                async with asyncio.timeout(self._config.read_s):
                    body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason="the body did not arrive in time") from None
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise explained(error) from error

    def _ask(self, request: web.Request, asked: openai.Common, made: Options) -> Options:
        """What the key says of a request."""
        key: Key = request["key"]
        made["tenant"] = key.tenant
        made["priority"] = class_within(made.get("priority", ""), key.ceiling)
        made["tenant_open_max"] = key.open_max
        trace = request.headers.get("traceparent", "")
        if re.fullmatch(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", trace):
            made["traceparent"] = trace
        return made

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, openai.ChatRequest)
        route, made = _route(asked.model), self._ask(request, asked, openai.chat_options(asked))
        name, created = f"chatcmpl-{_unique()}", stamp()
        if asked.stream:
            shape = ChatShape(name, created, asked)
            return await self.streams.run(request, shape, route, [""], made)
        answer = await self._client.generate(route, "", **made)
        request["tokens"] = answer.usage.completion_tokens
        choices = [openai.chat_choice(index, each, asked) for index, each in enumerate(answer.choices)]
        return as_json(_whole("chat.completion", name, created, asked.model, choices, openai.usage(answer.usage)))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, openai.CompletionRequest)
        prompts = openai.completion_prompts(asked)
        route, made = _route(asked.model), self._ask(request, asked, openai.completion_options(asked))
        name, created = f"cmpl-{_unique()}", stamp()
        if asked.stream:
            shape = PlainShape(name, created, asked)
            return await self.streams.run(request, shape, route, prompts, made)
        answers = await self._all(route, prompts, made)
        num_choices = asked.n or 1
        choices = [
            openai.plain_choice(number * num_choices + index, choice, answer, asked)
            for number, answer in enumerate(answers)
            for index, choice in enumerate(answer.choices)
        ]
        told = openai.usage(openai.total([answer.usage for answer in answers]))
        request["tokens"] = told["completion_tokens"]
        return as_json(_whole("text_completion", name, created, asked.model, choices, told))

    # Responses.

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, responses.ResponsesRequest)
        key: Key = request["key"]
        turns = responses.messages(asked)
        if asked.previous_response_id:
            try:
                kept = await self._client.fetch(asked.previous_response_id, key.tenant)
            except EngineError as error:
                raise _renamed(error, "previous_response_id") from error
            turns = responses.conversation(kept) + turns
        route, made = _route(asked.model), self._ask(request, asked, responses.options(asked, turns))
        name = f"resp_{uuid.uuid4().hex}"
        response = responses.begin(asked, name, stamp())
        made["request"] = name
        if responses.is_stored(asked):
            made["keep_s"] = responses.KEEP_S
            made["note"] = msgspec.json.encode(responses.Note(response, turns))
        try:
            if asked.stream:
                made["detach"] = bool(asked.background)
                shape = responses.ResponseShape(response)
                return await self.streams.run(request, shape, route, [""], made, bool(asked.background))
            if asked.background:
                return as_json(await self._begin(route, key.tenant, made))
            answer = await self._client.generate(route, "", **made)
        except EngineError as error:
            raise _renamed(error, "input") from error
        request["tokens"] = answer.usage.completion_tokens
        return as_json(responses.finish(response, answer.choices[0], answer.usage))

    async def _begin(self, route: str, tenant: str, made: Options) -> dict[str, Any]:
        """Start a response that runs by itself, and say how it stands. Raises EngineError when it was refused."""
        sink = AsyncSink()
        made["detach"] = True
        await self._client.submit(route, "", sink, False, made)
        try:
            return responses.of_stored(await self._client.fetch(made["request"], tenant))
        except EngineError:
            if sink.size() and isinstance(event := await sink.get(), FINAL):
                raise_unless_finished(event)
            raise

    async def _response(self, request: web.Request) -> web.Response:
        if request.query.get("stream") in {"true", "1"}:
            raise invalid("stream", "a kept response is told whole; stream is for its creation")
        return as_json(responses.of_stored(await self._kept(request)))

    async def _kept(self, request: web.Request) -> Stored:
        """Raises EngineError when this key has no such response."""
        name = request.match_info["id"]
        if not 1 <= len(name) <= 64:
            raise EngineError(Code.NOT_FOUND, "no such response is kept", "response_id")
        key: Key = request["key"]
        try:
            kept = await self._client.fetch(name, key.tenant)
        except EngineError as error:
            raise _renamed(error, "response_id") from error
        responses.read_note(kept.note)
        return kept

    async def _cancel_response(self, request: web.Request) -> web.Response:
        kept = await self._kept(request)
        if not kept.is_over:
            key: Key = request["key"]
            await self._client.cancel(kept.request, key.tenant)
            kept = await self._kept(request)
        return as_json(responses.of_stored(kept))

    async def _forget_response(self, request: web.Request) -> web.Response:
        kept = await self._kept(request)
        key: Key = request["key"]
        await self._client.forget(kept.request, key.tenant)
        return as_json({"id": kept.request, "object": "response", "deleted": True})

    async def _response_input(self, request: web.Request) -> web.Response:
        return as_json(responses.input_items(await self._kept(request)))

    async def _all(self, route: str, prompts: list[str | list[int]], made: Options) -> list[Completion]:
        """Every prompt's answer; when one fails the others are cancelled, and its error is told."""
        if len(prompts) == 1:
            return [await self._client.generate(route, prompts[0], **made)]
        tasks = [asyncio.ensure_future(self._client.generate(route, prompt, **made)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    told = {"Content-Type": "application/json", **(headers or {})}
    return web.Response(body=msgspec.json.encode(value), status=status, headers=told)


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
    answer = as_json(error_body(EngineError(code_of(status), what), status), status, {"Server": "engine"})
    answer.force_close()
    return answer


def adapt_connections(read_s: float) -> None:
    """What aiohttp has no setting for: it answers malformed requests in plain text with its version, and logs their
    bytes; and it waits for ever for the first request of a connection."""
    connection_made = RequestHandler.connection_made

    def made(handler: RequestHandler, transport: asyncio.BaseTransport) -> None:
        connection_made(handler, transport)
        asyncio.get_running_loop().call_later(read_s, cut, handler)

    def cut(handler: RequestHandler) -> None:
        if handler._request_count == 0 and handler.transport is not None:
            handler.transport.abort()

    RequestHandler.handle_error = _on_malformed  # type: ignore[method-assign, assignment]
    RequestHandler.connection_made = made  # type: ignore[method-assign, assignment]


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "engine"


def _renamed(error: EngineError, name: str) -> EngineError:
    """The error with the field as this endpoint calls it."""
    field = error.field
    if field in {"request", "prompt"}:
        field = name
    elif field.startswith("messages"):
        field = name + field.removeprefix("messages")
    elif field == "max_tokens":
        field = "max_output_tokens"
    return EngineError(error.code, error.message, field, error.retry_after_s)


def _route(model: str) -> str:
    """A model's name as a route. Raises EngineError when it cannot be one."""
    if not 1 <= len(model) <= 64:
        raise EngineError(Code.NOT_FOUND, f"no model {model[:64]!r}", "route")
    return model


def _whole(
    kind: str, name: str, created: int, model: str, choices: list[dict[str, Any]], told: dict[str, Any]
) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": created, "model": model, "choices": choices, "usage": told}
