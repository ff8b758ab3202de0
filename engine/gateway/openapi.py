"""Owns the OpenAPI document: every endpoint, with the schemas of the Structs that requests are decoded into.

Pure. Called by the handlers' table of routes, which is built from the same list, and by tests.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

from engine import __version__
from engine.gateway import answers, openai, responses

REF: Final = "#/components/schemas/{name}"
SSE: Final = "text/event-stream"
GUARDED: Final[list[dict[str, list[str]]]] = [{"key": []}]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `name` is that of its handler and its operation id."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[msgspec.Struct] | None  # None: text
    asked: type[msgspec.Struct] | None = None
    has_stream: bool = False
    is_open: bool = False
    is_health: bool = False


ENDPOINTS: Final = (
    Endpoint("get", "/livez", "livez", "This gateway lives", answers.Health, is_open=True, is_health=True),
    Endpoint("get", "/readyz", "readyz", "A route serves", answers.Health, is_open=True, is_health=True),
    Endpoint("get", "/startupz", "startupz", "A route has served once", answers.Health, is_open=True, is_health=True),
    Endpoint("get", "/health", "health", "As /readyz", answers.Health, is_open=True, is_health=True),
    Endpoint("get", "/metrics", "metrics", "Metrics in Prometheus' text format", None),
    Endpoint("get", "/openapi.json", "openapi", "This document", None),
    Endpoint("get", "/v1/models", "models", "Names that can be asked for", answers.ModelListAnswer),
    Endpoint("get", "/v1/models/{id}", "model", "One of them", answers.ModelAnswer),
    Endpoint(
        *("post", "/v1/chat/completions", "chat", "Answer a conversation", answers.ChatAnswer, openai.ChatRequest),
        has_stream=True,
    ),
    Endpoint(
        *("post", "/v1/completions", "complete", "Continue a text", answers.CompletionAnswer),
        asked=openai.CompletionRequest,
        has_stream=True,
    ),
    Endpoint(
        *("post", "/v1/responses", "respond", "Answer, and keep the answer", answers.ResponseAnswer),
        asked=responses.ResponsesRequest,
        has_stream=True,
    ),
    Endpoint("get", "/v1/responses/{id}", "response", "A kept response", answers.ResponseAnswer),
    Endpoint("delete", "/v1/responses/{id}", "forget_response", "Forget it", answers.ResponseDeleted),
    Endpoint("post", "/v1/responses/{id}/cancel", "cancel_response", "Stop it", answers.ResponseAnswer),
    Endpoint("get", "/v1/responses/{id}/input_items", "response_input", "What it answers", answers.ResponseInput),
    Endpoint(
        *("post", "/tokenize", "tokenize", "Token ids of a text", answers.TokenizeAnswer, openai.TokenizeRequest),
    ),
    Endpoint(
        *("post", "/detokenize", "detokenize", "The text of token ids", answers.DetokenizeAnswer),
        asked=openai.DetokenizeRequest,
    ),
)
REFUSALS: Final = {
    400: "A field is wrong; `param` names it",
    401: "A valid API key is needed",
    404: "No such path, model or response",
    405: "Not with this method",
    408: "The request did not arrive in time",
    409: "It exists already, or the client left",
    413: "The body is too large",
    415: "The body is no JSON",
    429: "Too much is waiting; Retry-After says when to come back",
    499: "It was cancelled",
    500: "A fault of the engine",
    501: "Not built",
    503: "Nobody can serve it now; Retry-After says when to come back",
    504: "Its deadline passed",
}


@cache
def document(is_guarded: bool) -> dict[str, Any]:
    """OpenAPI 3.1, of an engine with or without keys."""
    structs = [each for endpoint in ENDPOINTS for each in (endpoint.asked, endpoint.answer) if each is not None]
    _, schemas = msgspec.json.schema_components([*structs, answers.ErrorAnswer], ref_template=REF)
    for schema in schemas.values():
        _untag(schema)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, is_guarded)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "engine",
            "version": __version__,
            "description": "Unknown fields are ignored; what is wrong is a 400 that names its field.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _untag(schema: Any) -> None:
    """Take out titles: a Struct's name is that of its component already."""
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        for each in schema.values():
            _untag(each)
    elif isinstance(schema, list):
        for each in schema:
            _untag(each)


def _schema(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=struct.__name__)}


def _operation(endpoint: Endpoint, is_guarded: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        content = {"application/json": {"schema": _schema(endpoint.answer)}}
    elif endpoint.path.endswith(".json"):
        content = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.has_stream:
        content[SSE] = {}
    told: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": {"200": {"description": "Done", "content": content}},
    }
    refusal = {"application/json": {"schema": _schema(answers.ErrorAnswer)}}
    for status, text in REFUSALS.items():
        told["responses"][str(status)] = {"description": text, "content": refusal}
    if endpoint.is_health:
        unwell = {"application/json": {"schema": _schema(answers.Health)}}
        told["responses"]["503"] = {"description": "Not now", "content": unwell}
    if is_guarded and not endpoint.is_open:
        told["security"] = GUARDED
    if "{id}" in endpoint.path:
        id_schema = {"type": "string", "minLength": 1, "maxLength": 64}
        told["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": id_schema}]
    if endpoint.asked is not None:
        body = {"application/json": {"schema": _schema(endpoint.asked)}}
        told["requestBody"] = {"required": True, "content": body}
    return told
