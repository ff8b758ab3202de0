"""Owns every message that crosses a process boundary, one Struct per verb, with its bounds.

Client and admin verbs are maps with field names, so that another language's client is an afternoon's work; messages
between front and worker are arrays, append-only. Knows no socket. `ipc/README.md` is the specification of what is
here: a change edits both. No field is open-typed: nothing a peer sends can build an unbounded or untyped tree.
"""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

MAJOR: Final = 1
MINOR: Final = 0

IDS_MAX: Final = 1_048_576  # token ids in one prompt or one emission
ENTRIES_MAX: Final = 4_096  # entries in one EVENTS or EMISSIONS message
CHOICES_MAX: Final = 128  # answers to one request
LOGPROBS_MAX: Final = 20  # likeliest tokens told beside each token
# Upper ends of the buckets of times between tokens, in seconds; the last bucket has none.
GAP_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)

Count = Annotated[int, Meta(ge=0, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=IDS_MAX)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
OptionalName = Annotated[str, Meta(max_length=64)]
Route = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=1024)]
Trace = Annotated[str, Meta(max_length=64)]
Prompt = Annotated[str, Meta(max_length=16 * 1024 * 1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
# What a chat template is told beside the messages; text, numbers and truth values alone.
TemplateArgs = Annotated[
    dict[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
        bool | Annotated[int, Meta(ge=-(2**53), le=2**53)] | float | Annotated[str, Meta(max_length=1024)] | None,
    ],
    Meta(max_length=16),
]
Entries = Annotated[list[Count], Meta(max_length=ENTRIES_MAX)]


class Kind(IntEnum):
    """The envelope's kind byte: it selects the decoder. Numbers are never reused."""

    HELLO = 1
    GENERATE = 2
    CANCEL = 3
    MODELS = 4
    STATUS = 5
    PING = 6
    BYE = 7
    TOKENIZE = 8
    METRICS = 9
    COUNT = 10
    FETCH = 11
    FORGET = 12
    WELCOME = 17
    EVENTS = 18
    MODEL_LIST = 19
    STATUS_REPORT = 20
    PONG = 21
    ERROR = 22
    TOKENIZED = 23
    METRICS_TEXT = 24
    KEPT = 25
    WORKER_HELLO = 33
    WORKER_READY = 34
    EMISSIONS = 35
    REPORT = 36
    ANSWER = 37
    ASSIGN = 49
    WITHDRAW = 50
    ASK = 51
    DRAIN = 65
    RELOAD = 66
    STOP = 67
    ADMIN_REPLY = 81


# Client <-> front: maps.


class Head(Struct, frozen=True, omit_defaults=True, gc=False):
    """The part the front reads. `request` is the client's own id, unique among its open requests."""

    request: OptionalName = ""
    traceparent: Trace = ""


class OwnerHead(Struct, frozen=True, omit_defaults=True, gc=False):
    """A request by its name: one of this session, or a kept one of this tenant."""

    request: OptionalName = ""
    tenant: OptionalName = ""
    traceparent: Trace = ""


class GenerateHead(Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a GENERATE that decides where and when it runs. `deadline_ms` counts from arrival; 0 is none.

    A request with `keep_s` stays with the engine for so long after it began: FETCH gets its events, from any session
    of its tenant. A frame after the body, its note, is kept with it. `detach` lets it run on without its session.
    It is refused when its tenant has `tenant_open_max` requests open; 0 is no bound. Those of one `conversation` go
    to one replica while it has room.
    """

    request: Name
    route: Route
    priority: Annotated[str, Meta(max_length=16)] = ""
    tenant: OptionalName = ""
    deadline_ms: Annotated[int, Meta(ge=0, le=604_800_000)] = 0
    traceparent: Trace = ""
    keep_s: Annotated[float, Meta(ge=0, le=604_800)] = 0.0
    detach: bool = False
    conversation: OptionalName = ""
    tenant_open_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class RouteHead(Struct, frozen=True, omit_defaults=True, gc=False):
    """A question to a worker of a route; `request` is the client's own id, and the answer carries it."""

    request: Name
    route: Route
    traceparent: Trace = ""


class EventsHead(Struct, frozen=True, gc=False):
    """Byte length of each entry in the EVENTS body, in order; the body is their concatenation."""

    lengths: Entries


class Hello(Struct, frozen=True, omit_defaults=True, gc=False):
    """First message of a session."""

    major: Annotated[int, Meta(ge=0, le=255)] = MAJOR
    minor: Annotated[int, Meta(ge=0, le=255)] = MINOR
    client: OptionalName = ""


class Message(Struct, frozen=True, gc=False):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Prompt


class Generate(Struct, frozen=True, omit_defaults=True):
    """What to generate, after `prompt` (text or token ids) or `messages` (rendered by the model's own template).

    `max_tokens` None fills the context; 0 generates nothing and goes with `echo`. Sampling fields that are None are
    the route's own. `split_reasoning` tells what a model thinks apart from what it says. Unknown fields are ignored; a
    wrong type is refused.
    """

    prompt: Prompt | TokenIds = ""
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = 256
    min_tokens: Annotated[int, Meta(ge=0, le=IDS_MAX)] = 0
    seed: Seed | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)] = []
    stop_ids: Annotated[list[TokenId], Meta(max_length=16)] = []
    ignore_eos: bool = False
    stream: bool = True
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    messages: Annotated[list[Message], Meta(max_length=4096)] = []
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = 0.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] = {}
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool = False
    parse_special: bool = False
    split_reasoning: bool = True
    template_args: TemplateArgs = {}


class Tokenize(Struct, frozen=True, omit_defaults=True):
    """Ids of a text, or of a conversation by the model's template; or with `ids` the text of those.

    `add_special` puts before a text what a prompt begins with.
    """

    text: Prompt = ""
    messages: Annotated[list[Message], Meta(max_length=4096)] = []
    ids: TokenIds | None = None
    add_special: bool = True
    parse_special: bool = False
    template_args: TemplateArgs = {}


class Tokenized(Struct, frozen=True):
    """The answer to TOKENIZE: the ids and their text; `max_model_len` bounds prompt and answer together."""

    ids: list[int]
    text: str
    max_model_len: Count


class Counts(Struct, frozen=True, omit_defaults=True):
    """What a gateway has answered since it last said so: requests by "ROUTE STATUS", and its open connections."""

    requests: Annotated[dict[Annotated[str, Meta(max_length=96)], Count], Meta(max_length=1024)] = {}


class Empty(Struct, frozen=True, gc=False):
    """A body without fields: CANCEL, MODELS, STATUS, PING, BYE, PONG."""


class Welcome(Struct, frozen=True, gc=False):
    """The session stands. Send something at least every `heartbeat_s`, or it ends after `heartbeat_misses` of them."""

    major: int
    minor: int
    session: Count
    heartbeat_s: float
    heartbeat_misses: int
    body_bytes_max: int
    session_requests_max: int


class Error(Struct, frozen=True, omit_defaults=True):
    """A refusal that ends no open request of this session, unless the code is `no_session` or `slow_reader`."""

    code: str
    message: str
    field: str = ""
    request: str = ""
    retry_after_s: float = 0.0


class Usage(Struct, frozen=True, gc=False):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0


class TopLogprob(Struct, frozen=True, gc=False):
    """A token that could have come: its id, its bytes, its natural log probability in the raw distribution."""

    id: TokenId
    bytes: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True, omit_defaults=True):
    """A token that came. `logprob` is None for the first of a prompt alone; `top` are the likeliest, best first."""

    id: TokenId
    bytes: bytes
    logprob: float | None
    top: list[TopLogprob] = []


class Delta(Struct, frozen=True, omit_defaults=True, tag="delta"):
    """More of a request: `ids` are output tokens index .. index + len(ids); `text` is what they make readable.

    `choice` says of which answer; `logprobs` has one entry per id where they were asked for; `prompt_tokens` is told
    with the first of answer 0; `reasoning` is more of what the model thinks before it answers.
    """

    request: str
    index: Count
    text: str
    ids: list[int]
    choice: Count = 0
    logprobs: list[TokenLogprob] = []
    prompt_tokens: Count = 0
    reasoning: str = ""


class Echo(Struct, frozen=True, omit_defaults=True, tag="echo"):
    """The prompt where it was asked for, in pieces: tokens index .. index + len(ids); the first has its text."""

    request: str
    index: Count
    text: str
    ids: list[int]
    logprobs: list[TokenLogprob] = []


class Ended(Struct, frozen=True, omit_defaults=True, tag="ended"):
    """The end of one of several answers; the others go on, and Finished comes when all have ended."""

    request: str
    index: Count
    text: str
    ids: list[int]
    choice: Count
    reason: str
    matched: str = ""
    logprobs: list[TokenLogprob] = []
    reasoning: str = ""


class Finished(Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The end of a request that ran to its end. `text` and `ids` continue the deltas; whole requests have all here.

    Of a request with several answers they are empty, and `reason` is that of choice 0.
    """

    request: str
    index: Count
    text: str
    ids: list[int]
    reason: str
    usage: Usage
    seed: Seed = 0
    matched: str = ""
    logprobs: list[TokenLogprob] = []
    reasoning: str = ""


class Failed(Struct, frozen=True, omit_defaults=True, tag="failed"):
    """The end of a request that was refused or broke; codes are those of `ipc/errors.py`."""

    request: str
    code: str
    message: str
    field: str = ""
    retry_after_s: float = 0.0


class Cancelled(Struct, frozen=True, tag="cancelled", gc=False):
    """The end of a request whose client asked for it. `completion_tokens` had been forwarded."""

    request: str
    completion_tokens: Count = 0


class Expired(Struct, frozen=True, tag="expired", gc=False):
    """The end of a request whose deadline passed; `has_run` is false when it never left the queue."""

    request: str
    completion_tokens: Count = 0
    has_run: bool = False


Event = Delta | Echo | Ended | Finished | Failed | Cancelled | Expired
FINAL: Final = (Finished, Failed, Cancelled, Expired)
# What has output tokens. A tuple: a union is built anew each time that its expression is evaluated.
SAID: Final = (Delta, Ended, Finished)


class Model(Struct, frozen=True, omit_defaults=True):
    """A route that can be asked for."""

    route: str
    is_ready: bool
    max_model_len: Count = 0
    version: str = ""
    aliases: list[str] = []


class ModelList(Struct, frozen=True):
    models: Annotated[list[Model], Meta(max_length=4096)]


class Kept(Struct, frozen=True, omit_defaults=True):
    """The answer to FETCH. `state` is queued, running or that of its end; `age_s` counts from its arrival. `lengths`
    are those of its events so far, whose bytes follow in the last frame, after its note."""

    state: str
    age_s: float
    lengths: list[int] = []


class ReplicaReport(Struct, frozen=True, omit_defaults=True):
    """One replica as the supervisor and the front see it. Times are seconds; rates per second."""

    slot: int
    route: str
    state: str
    epoch: int = 0
    pid: int = 0
    devices: list[str] = []
    phase: str = ""
    state_s: float = 0.0
    ready_after_s: float = 0.0
    num_deaths: int = 0
    reason: str = ""
    num_in_flight: int = 0
    num_seats: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    is_row_exact: bool = False
    num_non_finite: int = 0


class RouteReport(Struct, frozen=True, omit_defaults=True):
    route: str
    is_ready: bool
    state: str = ""
    num_queued: int = 0
    num_running: int = 0


class Counters(Struct, frozen=True):
    """Since the front started. `finished + failed + cancelled + expired` + open = accepted + refused."""

    num_sessions: int = 0
    num_open: int = 0
    num_queued: int = 0
    accepted: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    tokens: int = 0
    stale_entries: int = 0
    protocol_errors: int = 0
    slow_readers: int = 0
    lost_peers: int = 0
    internal_errors: int = 0
    journal_tokens: int = 0
    outbox_bytes: int = 0


class StatusReport(Struct, frozen=True):
    """What `status` shows. `state` is starting, ready, degraded, failed or draining."""

    version: str
    state: str
    pid: int
    uptime_s: float
    config_hash: str
    routes: Annotated[list[RouteReport], Meta(max_length=4096)]
    replicas: Annotated[list[ReplicaReport], Meta(max_length=4096)]
    counters: Counters


# Admin: maps.


class Drain(Struct, frozen=True, omit_defaults=True):
    """Stop taking requests, finish what runs. A slot drains one replica; -1 drains the engine, which then exits."""

    slot: Annotated[int, Meta(ge=-1, le=4096)] = -1


class Stop(Struct, frozen=True, omit_defaults=True):
    """End the engine: after draining, or at once when `now`."""

    now: bool = False


class AdminReply(Struct, frozen=True, omit_defaults=True):
    """The answer to an admin verb: what was done, or why not."""

    ok: bool
    message: str = ""
    changed: list[str] = []


# Worker <-> front: arrays, append-only.


class WorkerHello(Struct, frozen=True, array_like=True, gc=False):
    """First message of a worker; `token` came in its environment and is good once."""

    token: Annotated[str, Meta(max_length=128)]
    slot: Count
    epoch: Count
    pid: Count
    major: Annotated[int, Meta(ge=0, le=255)] = MAJOR


class WorkerReady(Struct, frozen=True, array_like=True, gc=False):
    """Warm-up is done; these are the worker's limits."""

    epoch: Count
    num_seats: Count
    num_blocks: Count
    block_size: Count
    max_model_len: Count
    version: OptionalName = ""
    is_row_exact: bool = False
    device: OptionalName = ""


class Ending(Struct, frozen=True, array_like=True, gc=False):
    """`position` in the columns of its Emissions is the last entry of that request; `outcome` is an Outcome."""

    position: Count
    outcome: Annotated[int, Meta(ge=0, le=3)]
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0
    reason: Annotated[str, Meta(max_length=16)] = ""


class Outcome(IntEnum):
    FINISHED = 0
    FAILED = 1
    WITHDRAWN = 2  # the worker's answer to Withdraw: the seat is free, nothing for the client
    REFUSED = 3  # failed before a seat was taken


class Emissions(Struct, frozen=True, array_like=True, gc=False):
    """What one step gave to one client connection, in columns; entry i is numbers[i], attempts[i], …

    `ids` are for the front's journal, counts[i] of them for entry i, of answer choices[i]; an empty column of choices
    is all zeros. Payload bytes of the entries follow in a frame the
    front forwards unread; lengths[i] is entry i's share of it, 0 when the client gets nothing for it.
    """

    epoch: Count
    step: Count
    session: Count
    numbers: Entries
    attempts: Entries
    indexes: Entries
    counts: Entries
    ids: Annotated[list[int], Meta(max_length=IDS_MAX)]
    lengths: Entries
    endings: Annotated[list[Ending], Meta(max_length=ENTRIES_MAX)] = []
    choices: Entries = []

    def is_square(self) -> bool:
        """True when the columns have one length and endings and ids lie within them."""
        size = len(self.numbers)
        return (
            size == len(self.attempts) == len(self.indexes) == len(self.counts) == len(self.lengths)
            and len(self.choices) in {0, size}
            and sum(self.counts) == len(self.ids)
            and all(ending.position < size for ending in self.endings)
        )


class Report(Struct, frozen=True, array_like=True, gc=False):
    """A worker's own account, every `report_s`; counters since its start.

    `gaps` are times between a sequence's tokens since the last report, by the buckets of `GAP_BOUNDS`, `gaps_s` their
    sum; `num_computed_tokens` are all that a device computed, the recomputed ones (after a preemption) among them.
    """

    epoch: Count
    step: Count
    busy_s: Seconds
    num_tokens: Count
    num_running: Count
    num_waiting: Count
    num_free_blocks: Count
    num_cached_blocks: Count
    num_preemptions: Count
    num_hit_tokens: Count
    is_idle: bool = False
    num_non_finite: Count = 0
    gaps: Annotated[list[Count], Meta(max_length=64)] = []
    gaps_s: Seconds = 0.0
    num_computed_tokens: Count = 0
    num_recomputed_tokens: Count = 0


class Assign(Struct, frozen=True, array_like=True, gc=False):
    """Run this. The client's GENERATE body follows as it came."""

    number: Count
    attempt: Count
    session: Count
    request: Name
    seed: Seed
    tenant: OptionalName = ""
    traceparent: Trace = ""


class Ask(Struct, frozen=True, array_like=True, gc=False):
    """A question of a client that is no request: its TOKENIZE body follows as it came."""

    session: Count
    request: Name


class Answer(Struct, frozen=True, array_like=True, gc=False):
    """The answer to Ask; its body is forwarded unread, as TOKENIZED or as ERROR."""

    epoch: Count
    session: Count
    request: Name
    is_error: bool = False


class Withdraw(Struct, frozen=True, array_like=True, gc=False):
    """Stop this; answer with a final entry of outcome WITHDRAWN, unless it has ended already."""

    number: Count
    attempt: Count
