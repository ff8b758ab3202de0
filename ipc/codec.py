"""Owns the way from frames to messages and back, and the limits checked before anything is decoded.

A message is [envelope, head, body, buffer...]. Knows no socket and keeps no state. Everything a peer can get wrong
here becomes a ProtocolError, never another exception.
"""

from typing import Final, TypeVar

import msgspec

from ipc.errors import Code, EngineError, ProtocolError
from ipc.messages import (
    MAJOR,
    AdminReply,
    Answer,
    Ask,
    Assign,
    Counts,
    Drain,
    Emissions,
    Empty,
    Error,
    Event,
    EventsHead,
    Failed,
    Generate,
    GenerateHead,
    Head,
    Hello,
    Kept,
    Kind,
    ModelList,
    OwnerHead,
    Report,
    RouteHead,
    StatusReport,
    Stop,
    Tokenize,
    Tokenized,
    Welcome,
    Withdraw,
    WorkerHello,
    WorkerReady,
)

MAGIC: Final = b"EN"
ENVELOPE_BYTES: Final = 5  # magic (2), major, kind, flags
FRAMES_MAX: Final = 64
HEAD_BYTES_MAX: Final = 64 * 1024
DECODE_BYTES_MAX: Final = 256 * 1024  # a larger GENERATE body is decoded by the worker alone

Frames = list[bytes]
T = TypeVar("T", bound=msgspec.Struct)

ENVELOPES: Final[dict[Kind, bytes]] = {kind: MAGIC + bytes((MAJOR, kind, 0)) for kind in Kind}
_KINDS: Final[dict[bytes, Kind]] = {envelope: kind for kind, envelope in ENVELOPES.items()}

# Kind -> (type of the head, type of the body); None: the frame is absent or opaque.
SHAPES: Final[dict[Kind, tuple[type[msgspec.Struct], type[msgspec.Struct] | None]]] = {
    Kind.HELLO: (Head, Hello),
    Kind.GENERATE: (GenerateHead, Generate),
    Kind.CANCEL: (OwnerHead, Empty),
    Kind.MODELS: (Head, Empty),
    Kind.STATUS: (Head, Empty),
    Kind.PING: (Head, Empty),
    Kind.BYE: (Head, Empty),
    Kind.TOKENIZE: (RouteHead, Tokenize),
    Kind.METRICS: (Head, Empty),
    Kind.COUNT: (Head, Counts),
    Kind.FETCH: (OwnerHead, Empty),
    Kind.FORGET: (OwnerHead, Empty),
    Kind.WELCOME: (Head, Welcome),
    Kind.EVENTS: (EventsHead, None),
    Kind.MODEL_LIST: (Head, ModelList),
    Kind.STATUS_REPORT: (Head, StatusReport),
    Kind.PONG: (Head, Empty),
    Kind.ERROR: (Head, Error),
    Kind.TOKENIZED: (Head, Tokenized),
    Kind.METRICS_TEXT: (Head, None),
    Kind.KEPT: (Head, Kept),
    Kind.WORKER_HELLO: (WorkerHello, None),
    Kind.WORKER_READY: (WorkerReady, None),
    Kind.EMISSIONS: (Emissions, None),
    Kind.REPORT: (Report, None),
    Kind.ANSWER: (Answer, None),
    Kind.ASSIGN: (Assign, None),
    Kind.WITHDRAW: (Withdraw, None),
    Kind.ASK: (Ask, None),
    Kind.DRAIN: (Head, Drain),
    Kind.RELOAD: (Head, Empty),
    Kind.STOP: (Head, Stop),
    Kind.ADMIN_REPLY: (Head, AdminReply),
}

_encoder: Final = msgspec.msgpack.Encoder()
encode = _encoder.encode
_decoders: Final[dict[type, msgspec.msgpack.Decoder[msgspec.Struct]]] = {
    struct: msgspec.msgpack.Decoder(struct) for shape in SHAPES.values() for struct in shape if struct is not None
}
_event_decoder: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event)
_EMPTY_HEAD: Final = encode(Head())


def kind_of(frames: Frames) -> Kind:
    """The kind of a message, after the checks that need no decoding.

    Raises ProtocolError: no frames, too many, a wrong envelope, an oversized head (code `protocol`); another major
    version or an unknown kind (code `unsupported`).
    """
    if not frames or len(frames) > FRAMES_MAX:
        raise ProtocolError(f"a message has 2 to {FRAMES_MAX} frames, this one has {len(frames)}")
    kind = _KINDS.get(frames[0])
    if kind is None:
        raise _bad_envelope(frames[0])
    if len(frames) < 2:
        raise ProtocolError("the head frame is missing")
    if len(frames[1]) > HEAD_BYTES_MAX:
        raise ProtocolError(f"the head is over {HEAD_BYTES_MAX} bytes", Code.TOO_LARGE)
    return kind


def _bad_envelope(envelope: bytes) -> ProtocolError:
    if len(envelope) != ENVELOPE_BYTES or envelope[:2] != MAGIC:
        return ProtocolError("the first frame is not an envelope of this protocol")
    if envelope[2] != MAJOR:
        return ProtocolError(f"major version {envelope[2]} is not spoken here, {MAJOR} is", Code.UNSUPPORTED)
    if envelope[3] not in {kind.value for kind in Kind}:
        return ProtocolError(f"kind {envelope[3]} is not known", Code.UNSUPPORTED)
    return ProtocolError(f"flags {envelope[4]} are not known", Code.UNSUPPORTED)


def decode(data: bytes, struct: type[T], part: str = "body") -> T:
    """One frame as a message. Raises ProtocolError with the path of the field that is wrong."""
    try:
        return _decoders[struct].decode(data)  # type: ignore[return-value]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(*_explain(error, part)) from error


def _explain(error: Exception, part: str) -> tuple[str, Code, str]:
    """msgspec says "... - at `$.stop[...]`": turn that into a field path."""
    if isinstance(error, RecursionError):
        return f"the {part} is nested too deeply", Code.PROTOCOL, ""
    text, _, path = str(error).replace("at `key` in `$", "at `$").partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if not field and isinstance(error, msgspec.ValidationError) and "`" in text and "field" in text:
        field = text.split("`")[1]  # "Object missing required field `route`"
    code = Code.INVALID if isinstance(error, msgspec.ValidationError) else Code.PROTOCOL
    return f"{part}: {text}", code, field


def message(kind: Kind, head: msgspec.Struct | None, body: msgspec.Struct | None = None) -> Frames:
    """Frames of one message. `head` None is the empty head of the map-form kinds."""
    frames = [ENVELOPES[kind], _EMPTY_HEAD if head is None else encode(head)]
    if body is not None:
        frames.append(encode(body))
    return frames


def events(entries: list[Event]) -> Frames:
    """One EVENTS message: what the front itself says about requests."""
    payloads = [encode(entry) for entry in entries]
    head = EventsHead([len(payload) for payload in payloads])
    return [ENVELOPES[Kind.EVENTS], encode(head), b"".join(payloads)]


def pieces(lengths: list[int], body: bytes) -> list[bytes]:
    """The payloads of these lengths, one after the other; an empty one for a length of 0."""
    parts: list[bytes] = []
    end = 0
    for length in lengths:
        start, end = end, end + length
        parts.append(body[start:end])
    return parts


def without(lengths: list[int], body: bytes, rejected: list[int]) -> tuple[bytes, bytes]:
    """Head and body of an EVENTS message with the payloads of these positions left out."""
    parts = pieces(lengths, body)
    kept = [part for position, part in enumerate(parts) if part and position not in rejected]
    return encode(EventsHead([len(payload) for payload in kept])), b"".join(kept)


def decode_events(frames: Frames) -> list[Event]:
    """The entries of an EVENTS message. Raises ProtocolError when lengths and body disagree."""
    return _events(decode(frames[1], EventsHead, "head").lengths, frames[2] if len(frames) > 2 else b"")


def decode_kept(frames: Frames) -> tuple[Kept, bytes, list[Event]]:
    """A KEPT: what it is, its note, its events so far. Raises ProtocolError."""
    if len(frames) != 5:
        raise ProtocolError("KEPT has an envelope, a head, a body, a note and events")
    kept = decode(frames[2], Kept)
    return kept, frames[3], _events(kept.lengths, frames[4])


def _events(lengths: list[int], data: bytes) -> list[Event]:
    body = memoryview(data)
    if sum(lengths) != len(body):
        raise ProtocolError("the lengths do not add up to the body", field="lengths")
    entries: list[Event] = []
    end = 0
    try:
        for length in lengths:
            start, end = end, end + length
            entries.append(_event_decoder.decode(body[start:end]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(*_explain(error, "entry")) from error
    return entries


def failed(request: str, error: EngineError) -> Failed:
    """The final event that carries a refusal."""
    return Failed(request, error.code.value, error.message, error.field, error.retry_after_s)
