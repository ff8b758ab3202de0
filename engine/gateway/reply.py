"""Owns what every answer over HTTP is made of: the error object with its status, server-sent events.

Pure: values in, values and bytes out. Called by the handlers and the shapes.
"""

from typing import Any, Final

import msgspec

from ipc.errors import HTTP_STATUS, Code, EngineError

DONE: Final = b"data: [DONE]\n\n"
# What is too large in tokens is the request's own fault, what is too large in bytes the body's.
TOKEN_FIELDS: Final = frozenset({"prompt", "messages", "input", "max_tokens", "max_output_tokens", "n"})


def status_of(error: EngineError) -> int:
    """The HTTP status of a refusal."""
    if error.code is Code.TOO_LARGE and error.field in TOKEN_FIELDS:
        return 400
    if error.code is Code.OVERLOADED and error.field == "tenant":
        return 429  # the key's own bound, not the engine's
    return HTTP_STATUS[error.code]


def error_body(error: EngineError, status: int) -> dict[str, Any]:
    """The OpenAI error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code: str = error.code.value
    if error.code is Code.TOO_LARGE and error.field == "prompt":
        code = "context_length_exceeded"
    if error.code is Code.NOT_FOUND and error.field == "route":
        code = "model_not_found"
    if status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    param = {"route": "model"}.get(error.field, error.field) or None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def sse(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


def explained(error: Exception) -> EngineError:
    """What is wrong with a body, by field."""
    if isinstance(error, RecursionError):
        return invalid("", "the body is nested too deeply")
    text, _, path = str(error).replace("at `key` in `$", "at `$").partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if not field and isinstance(error, msgspec.ValidationError) and "`" in text and "field" in text:
        field = text.split("`")[1]
    return invalid(field, text)


def code_of(status: int) -> Code:
    if status == 404:
        return Code.NOT_FOUND
    return Code.TOO_LARGE if status == 413 else Code.INVALID if status < 500 else Code.INTERNAL


def invalid(field: str, message: str) -> EngineError:
    """What is wrong with a field."""
    return EngineError(Code.INVALID, message, field)
