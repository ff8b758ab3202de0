"""Owns the front actor: the one way a request goes from the client socket to a worker and back.

It decides nothing itself: order, admission, routing and the request table are pure and stand beside it. It knows no
model, no tokenizer and no process; what the supervisor knows reaches it as messages of `ipc/control.py`.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

import structlog
import zmq

from engine import __version__
from engine.clock import Clock
from engine.config import Config, Deployment
from engine.config import Front as FrontConfig
from engine.front import status
from engine.front.admission import Admission, Limits
from engine.front.deadlines import Deadlines
from engine.front.desk import Desk
from engine.front.metrics import Metrics
from engine.front.order import Order
from engine.front.replicas import ReplicaTable, ReplicaView
from engine.front.requests import Request, RequestState, RequestTable, priority_class
from engine.front.router import Router
from engine.front.sessions import Session
from engine.front.shelf import Item, Shelf
from engine.front.zap import Remote
from engine.keys import class_within
from ipc import codec
from ipc.actor import Actor
from ipc.channel import Channel, Sent
from ipc.control import (
    Admit,
    Arrived,
    AskStatus,
    Close,
    Drained,
    Emptied,
    Expect,
    Lost,
    Pause,
    Placed,
    SaidReady,
    StatusTold,
    Turn,
    Turned,
)
from ipc.errors import Code, EngineError, ProtocolError
from ipc.messages import (
    Answer,
    Ask,
    Assign,
    Cancelled,
    Counters,
    Counts,
    Emissions,
    Ending,
    Error,
    Event,
    Expired,
    Failed,
    Generate,
    GenerateHead,
    Head,
    Kept,
    Kind,
    ModelList,
    Outcome,
    OwnerHead,
    Report,
    RouteHead,
    StatusReport,
    Withdraw,
    WorkerHello,
    WorkerReady,
)

log = structlog.get_logger("front")

FLUSH_S: Final = 0.02
EXPIRE_S: Final = 1.0
SEED_BITS: Final = 63
UNREAD_MAX_TOKENS: Final = 256  # what a body too large to be read here is taken to ask for
WORKER_LOST: Final = "the worker that ran it died"
LOCAL_KINDS: Final = frozenset({Kind.STATUS, Kind.METRICS, Kind.COUNT})  # not for peers of other machines
_EVENTS: Final = codec.ENVELOPES[Kind.EVENTS]

Frames = list[bytes]


class Plan:
    """What the front keeps per route: its settings, its queue, its router."""

    __slots__ = ("config", "order", "router")

    def __init__(self, config: Deployment, age_step_s: float, scan_max: int) -> None:
        self.config = config
        self.order = Order(age_step_s, scan_max)
        self.router = Router()


class Front(Actor):
    """The data plane. `supervise` takes messages for the supervisor."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
        clock: Clock,
        supervise: Callable[[object], None],
        remote: Remote | None = None,
    ) -> None:
        """`sockets` are those for clients of this user and for workers; `remote` is for clients who show a key."""
        super().__init__(loop)
        self._clock = clock
        self._supervise = supervise
        self._clients = Channel(sockets[0])
        self._workers = Channel(sockets[1])
        self._desk = Desk(self._clients, config.front, clock, self._on_session_gone)
        self._remote = remote
        self._remote_door = self._desk.open_door(remote.channel, remote.keys) if remote is not None else 0
        self._tenants: Counter[str] = Counter()  # open requests
        self._table = RequestTable(config.front.requests_max)
        self._admission = Admission(_limits(config.front))
        self._replicas = ReplicaTable()
        self._plans: dict[str, Plan] = {}
        self._deadlines = Deadlines(lambda number: self._table.get(number) is not None)
        self._deadline_at = inf
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._placed = Placed("starting", "", [], [])
        self._hopeless: set[str] = set()
        self._started_at = clock.now()
        self._is_closing = False
        self._turn = 0  # asked for and not had yet
        self._metrics = Metrics(clock.now())
        self._shelf = Shelf(config.front.kept_max, config.front.kept_bytes_max)
        self._aliases: dict[str, str] = {}
        self.num_internal_errors = 0
        self.num_refused = 0
        self.configure(config)
        self.handle(Expect, self._on_expect)
        self.handle(Admit, self._on_admit)
        self.handle(Pause, self._on_pause)
        self.handle(Lost, self._on_lost)
        self.handle(Close, self._on_close)
        self.handle(Placed, self._on_placed)
        self.handle(AskStatus, self._on_ask_status)
        self.handle(Turn, self._on_turn)
        self.handle(Config, self.configure)

    def configure(self, config: Config) -> None:
        """Apply the live settings. Queued requests stay where they are."""
        self._desk.config = config.front
        self._admission.limits = _limits(config.front)
        self._shelf.items_max, self._shelf.bytes_max = config.front.kept_max, config.front.kept_bytes_max
        self._aliases = {alias: each.route for each in config.deployment for alias in each.aliases}
        for deployment in config.deployment:
            plan = self._plans.get(deployment.route)
            if plan is None:
                plan = Plan(deployment, config.front.age_step_s, config.front.scan_max)
                self._plans[deployment.route] = plan
            plan.config = deployment

    def start(self) -> None:
        """Begin to listen. The sockets are bound already."""
        self._clients.attach(self.loop, self._on_client)
        self._workers.attach(self.loop, self._on_worker)
        if self._remote is not None:
            self._remote.zap.start(self.loop)
            self._remote.channel.attach(self.loop, partial(self._on_client, door=self._remote_door))
        self.every(FLUSH_S, self._flush)
        self.every(EXPIRE_S, lambda: self._shelf.expire(self._clock.now()))
        self.every(self._desk.config.heartbeat_s / 2, self._desk.end_silent)

    def stop(self) -> None:
        """End every open request with `unavailable`, then close the sockets."""
        for request in list(self._table):
            self._end(request, RequestState.FAILED, Failed(request.name, Code.UNAVAILABLE, "the engine stopped"))
        self._desk.flush()
        self.stop_serving()
        self._clients.close()
        self._workers.close()
        if self._remote is not None:
            self._remote.channel.close()
            self._remote.zap.close()

    # What clients say.

    def _on_client(self, frames: Frames, door: int = 0) -> None:
        try:
            said = self._desk.admit(frames, door)
            if said is not None:
                self._on_verb(*said)
        except ProtocolError as error:
            self._desk.refuse(frames[0], error, door)
        except Exception:  # the boundary around one message of one peer
            self.num_internal_errors += 1
            log.exception("client_message_failed")
            self._desk.refuse(frames[0], ProtocolError("a fault of this engine", Code.INTERNAL), door)

    def _on_verb(self, session: Session, kind: Kind, message: Frames) -> None:
        if kind is Kind.GENERATE:
            self._on_generate(session, message)
        elif kind is Kind.CANCEL:
            self._on_cancel(session, codec.decode(message[1], OwnerHead, "head"))
        elif session.key is not None and kind in LOCAL_KINDS:
            raise ProtocolError(f"{kind.name} is for peers of this machine", Code.DENIED)
        elif kind is Kind.MODELS:
            self._desk.send(session, codec.message(Kind.MODEL_LIST, None, self.models()))
        elif kind is Kind.STATUS:
            self._desk.send(session, codec.message(Kind.STATUS_REPORT, None, self.status()))
        elif kind is Kind.TOKENIZE:
            self._on_tokenize(session, codec.decode(message[1], RouteHead, "head"), message)
        elif kind in {Kind.FETCH, Kind.FORGET}:
            self._on_fetch(session, kind, codec.decode(message[1], OwnerHead, "head"))
        elif kind is Kind.METRICS:
            self._desk.send(session, [*codec.message(Kind.METRICS_TEXT, None), self.metrics()])
        elif kind is Kind.COUNT:
            if len(message) != 3:
                raise ProtocolError("the body frame is missing")
            self._metrics.count_http(codec.decode(message[2], Counts))
        else:
            raise ProtocolError(f"{kind.name} is not for the client socket", Code.UNSUPPORTED)

    def _on_generate(self, session: Session, message: Frames) -> None:
        head = codec.decode(message[1], GenerateHead, "head")
        if head.request in session.requests:
            refusal = Error(Code.DUPLICATE, "this id is still open in this session", "request", head.request)
            self._desk.error(session, refusal)
            return
        try:
            request = self._accept(session, head, message)
        except (EngineError, ProtocolError) as error:
            self.num_refused += 1
            route = self._aliases.get(head.route, head.route)
            self._metrics.observe_refusal(route if route in self._plans else "", error.code)
            retry_after_s = error.retry_after_s if isinstance(error, EngineError) else 0.0
            failed = Failed(head.request, error.code, error.message, error.field, retry_after_s)
            self._desk.tell(session, failed)
            return
        self._arm_deadline(request)
        self._pump(self._plans[request.route])

    def _accept(self, session: Session, head: GenerateHead, message: Frames) -> Request:
        """Check and queue one request. Raises EngineError or ProtocolError naming the field."""
        if len(message) != 3 and not (head.keep_s and len(message) == 4):
            told = "GENERATE has an envelope, a head and a body, and a note only where it is kept"
            raise ProtocolError(told, Code.INVALID, "body")
        if self._is_closing:
            raise EngineError(Code.UNAVAILABLE, "the engine is draining", retry_after_s=5.0)
        plan = self._plan(head.route)
        route = plan.config.route
        if route in self._hopeless:
            raise EngineError(Code.UNAVAILABLE, f"no replica of route {route} can serve", retry_after_s=10.0)
        body, queue = message[2], plan.config.queue
        self._admission.check(len(body), len(session.requests), len(self._table))
        generate = codec.decode(body, Generate) if len(body) <= codec.DECODE_BYTES_MAX else None
        tenant = head.tenant if session.key is None else session.key.tenant
        asked = head.priority if session.key is None else class_within(head.priority, session.key.ceiling)
        priority = priority_class(asked or queue.default_class)
        open_max = head.tenant_open_max if session.key is None else session.key.open_max
        if open_max and self._tenants[tenant] >= open_max:
            raise EngineError(Code.OVERLOADED, f"{open_max} requests of this tenant are open", "tenant", 1.0)
        self._admission.check_queue(route, len(plan.order), queue.max_queued)
        now = self._clock.now()
        deadline_ms = head.deadline_ms or queue.default_deadline_ms
        seed = generate.seed if generate is not None else None
        num_choices = generate.n if generate is not None else 1
        max_tokens = generate.max_tokens if generate is not None else UNREAD_MAX_TOKENS
        if max_tokens is None:  # as much as the context holds, which most answers do not use
            max_tokens = UNREAD_MAX_TOKENS
        request = Request(
            number=self._table.next_number(),
            session=session.number,
            name=head.request,
            route=route,
            priority=priority,
            tenant=tenant,
            cost=self._admission.cost(route, len(body), max_tokens * num_choices),
            arrived_at=now,
            deadline_at=now + deadline_ms / 1e3 if deadline_ms else inf,
            seed=random.getrandbits(SEED_BITS) if seed is None else seed,
            body=body,
            traceparent=head.traceparent,
            num_choices=num_choices,
            is_detached=head.detach and head.keep_s > 0,
            conversation=f"{tenant}/{head.conversation}" if head.conversation else "",
        )
        if head.keep_s:
            until = now + min(head.keep_s, self._desk.config.keep_s)
            note = message[3] if len(message) == 4 else b""
            self._shelf.put(Item(head.request, tenant, request.number, note, now, until), now)
        self._table.add(request)
        self._tenants[tenant] += 1
        self._metrics.observe_arrival(request.route, now)
        session.requests[head.request] = request.number
        plan.order.push(request)
        return request

    def _plan(self, name: str) -> Plan:
        """The plan of a route by its name or an alias. Raises EngineError `not_found`."""
        plan = self._plans.get(self._aliases.get(name, name))
        if plan is None:
            raise EngineError(Code.NOT_FOUND, f"no route {name}", "route")
        return plan

    def _on_tokenize(self, session: Session, head: RouteHead, message: Frames) -> None:
        """To any worker of the route that serves: it costs no seat. Lost with it; the client's wait is bounded."""
        if len(message) != 3:
            raise ProtocolError("TOKENIZE has an envelope, a head and a body", Code.INVALID, "body")
        try:
            route = self._plan(head.route).config.route
            views = [view for view in self._replicas.by_slot.values() if view.route == route and view.can_answer]
            if not views:
                raise EngineError(Code.UNAVAILABLE, f"no replica of route {route} serves", retry_after_s=1.0)
            view = min(views, key=lambda each: len(each.in_flight))
            question = codec.encode(Ask(session.number, head.request))
            ask = [view.identity, codec.ENVELOPES[Kind.ASK], question, message[2]]
            if self._workers.send_nowait(ask) is not Sent.YES:
                raise EngineError(Code.OVERLOADED, "the worker does not read now", retry_after_s=0.1)
        except EngineError as error:
            self._desk.error(session, _refusal(error, head.request))

    def _on_answer(self, view: ReplicaView, answer: Answer, message: Frames) -> None:
        session = self._desk.sessions.of_number(answer.session)
        if session is not None and answer.epoch == view.epoch and len(message) == 3:
            kind = Kind.ERROR if answer.is_error else Kind.TOKENIZED
            head = codec.encode(Head(answer.request))
            self._desk.send(session, [codec.ENVELOPES[kind], head, message[2]])

    def _on_cancel(self, session: Session, head: OwnerHead) -> None:
        """One of this session, or a kept one of the tenant: that one's own session hears of it."""
        number = session.requests.get(head.request)
        if number is None:
            try:
                number = self._shelf.find(head.request, _tenant(session, head)).number
            except EngineError:
                told = Error(Code.NOT_FOUND, "no such open request in this session", "request", head.request)
                self._desk.error(session, told)
                return
        request = self._table.get(number)
        if request is not None:
            self._end(request, RequestState.CANCELLED, Cancelled(request.name, request.num_ids))

    def _on_fetch(self, session: Session, kind: Kind, head: OwnerHead) -> None:
        """What is kept of a request; FORGET takes it off the shelf as well, and ends it if it still runs."""
        tenant = _tenant(session, head)
        try:
            item = self._shelf.find(head.request, tenant)
        except EngineError as error:
            self._desk.error(session, _refusal(error, head.request))
            return
        request = self._table.get(item.number)
        if kind is Kind.FORGET:
            if request is not None:
                self._end(request, RequestState.CANCELLED, Cancelled(request.name, request.num_ids))
            self._shelf.forget(head.request, tenant)
        state = item.state or ("queued" if request is None or request.state is RequestState.QUEUED else "running")
        kept = Kept(state, self._clock.now() - item.arrived_at, [len(event) for event in item.events])
        message = codec.message(Kind.KEPT, Head(head.request), kept)
        self._desk.send(session, [*message, item.note, b"".join(item.events)])

    def _on_session_gone(self, session: Session, code: Code) -> None:
        for number in list(session.requests.values()):
            request = self._table.get(number)
            if request is not None and not request.is_detached:
                self._end(request, RequestState.CANCELLED, None)
        if code is not Code.CANCELLED:
            log.warning("session_ended", session=session.number, code=code)

    # How a request leaves the queue, and how it ends.

    def _pump(self, plan: Plan) -> None:
        """Give queued requests to replicas with free capacity, best first."""
        chosen: int | None = None

        def fits(request: Request) -> bool:
            nonlocal chosen
            chosen = plan.router.choose(request.cost, loads, request.num_choices, request.conversation)
            return chosen is not None

        while len(plan.order):
            loads = self._replicas.loads(plan.config.route)
            if not loads:
                return
            request = plan.order.pop(fits)
            if request is None or chosen is None:
                return
            self._dispatch(request, self._replicas.by_slot[chosen], plan)

    def _dispatch(self, request: Request, view: ReplicaView, plan: Plan) -> None:
        """Hand a request to a worker; back into the queue, under its own arrival, when the worker does not read."""
        self._table.dispatch(request, view.slot)
        attempt, session, seed = request.attempt, request.session, request.seed
        head = Assign(request.number, attempt, session, request.name, seed, request.tenant, request.traceparent)
        sent = self._workers.send_nowait(
            [view.identity, codec.ENVELOPES[Kind.ASSIGN], codec.encode(head), request.body]
        )
        if sent is Sent.YES:
            view.assign(request.number, request.cost, request.num_choices)
            if request.conversation:
                plan.router.remember(request.conversation, view.slot)
            self._metrics.observe_dispatch(request, self._clock.now())
        else:
            view.is_clogged = True
            self._table.requeue(request)
            plan.order.push(request)

    def _end(self, request: Request, state: RequestState, event: Event | None) -> None:
        """The one place where a request that the front ends gets its one final message."""
        session = self._desk.sessions.of_number(request.session)
        if request.state is RequestState.QUEUED:
            self._plans[request.route].order.remove(request.number)
        elif request.slot is not None:
            view = self._replicas.by_slot.get(request.slot)
            if view is not None and request.number in view.in_flight:
                withdraw = codec.encode(Withdraw(request.number, request.attempt))
                self._workers.send_nowait([view.identity, codec.ENVELOPES[Kind.WITHDRAW], withdraw])
        if event is None and self._shelf.is_open:
            event = Cancelled(request.name, request.num_ids)
        if event is not None:
            self._shelf.append(request.number, codec.encode(event))
        self._forget(request, state)
        if session is not None and event is not None:
            self._desk.tell(session, event)

    def _forget(self, request: Request, state: RequestState, reason: str = "") -> None:
        session = self._desk.sessions.of_number(request.session)
        if session is not None:
            session.requests.pop(request.name, None)
        self._table.end(request, state)
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
        self._shelf.end(request.number, state.value)
        self._metrics.observe_end(request, reason or state.value, self._clock.now())
        self._admission.observe_end(request.route, self._clock.now())
        if self._is_closing and not len(self._table):
            self._supervise(Drained())

    def _arm_deadline(self, request: Request) -> None:
        self._deadlines.add(request.deadline_at, request.number, len(self._table))
        if request.deadline_at < self._deadline_at:
            self._set_deadline_timer()

    def _set_deadline_timer(self) -> None:
        if self._deadline_timer is not None:
            self.cancel(self._deadline_timer)
            self._deadline_timer = None
        self._deadline_at = self._deadlines.next_at()
        if self._deadline_at < inf:
            delay_s = max(0.0, self._deadline_at - self._clock.now())
            self._deadline_timer = self.after(delay_s, self._on_deadline)

    def _on_deadline(self) -> None:
        for number in self._deadlines.due(self._clock.now()):
            request = self._table.get(number)
            if request is not None:
                has_run = request.state is RequestState.STREAMING
                self._end(request, RequestState.EXPIRED, Expired(request.name, request.num_ids, has_run))
        self._set_deadline_timer()

    # What workers say.

    def _on_worker(self, frames: Frames) -> None:
        identity = frames[0]
        try:
            message = frames[1:]
            kind = codec.kind_of(message)
            if kind is Kind.WORKER_HELLO:
                self._on_worker_hello(identity, codec.decode(message[1], WorkerHello, "head"))
                return
            view = self._replicas.of_identity(identity)
            if view is None:
                self._table.num_stale += 1  # a worker of an older epoch
            elif kind is Kind.EMISSIONS:
                self._on_emissions(view, codec.decode(message[1], Emissions, "head"), message)
            elif kind is Kind.ANSWER:
                self._on_answer(view, codec.decode(message[1], Answer, "head"), message)
            elif kind is Kind.REPORT:
                self._on_report(view, codec.decode(message[1], Report, "head"))
            elif kind is Kind.WORKER_READY:
                view.ready = codec.decode(message[1], WorkerReady, "head")
                self._supervise(SaidReady(view.slot, view.epoch, view.ready))
            else:
                raise ProtocolError(f"{kind.name} is not for the worker socket", Code.UNSUPPORTED)
        except ProtocolError as error:
            self._desk.num_protocol_errors += 1
            log.warning("worker_message_refused", message=error.message)
            refusal = Error(error.code, error.message, error.field)
            self._workers.send_nowait([identity, *codec.message(Kind.ERROR, None, refusal)])

    def _on_worker_hello(self, identity: bytes, hello: WorkerHello) -> None:
        view = self._replicas.introduce(identity, hello)
        self._supervise(Arrived(view.slot, view.epoch))

    def _on_emissions(self, view: ReplicaView, emissions: Emissions, message: Frames) -> None:
        if emissions.epoch != view.epoch or len(message) != 4:
            self._table.num_stale += len(emissions.numbers)
            return
        if not emissions.is_square():
            raise ProtocolError("the columns of these emissions do not fit together")
        rejected = self._table.accept(view.slot, emissions)
        view.outstanding -= len(emissions.ids)
        if self._table.started:
            self._metrics.observe_started(self._table.started, self._clock.now())
            self._table.started.clear()
        session = self._desk.sessions.of_number(emissions.session)
        if session is not None:
            if rejected:
                head, body = codec.without(emissions.lengths, message[3], rejected)
            else:
                head, body = message[2], message[3]
            if body:
                self._desk.send(session, [_EVENTS, head, body])
        for position in rejected:
            self._check_rejected(view, emissions, position)
        if self._shelf.is_open:
            self._keep(emissions, message, rejected)
        if emissions.endings:
            for ending in emissions.endings:
                self._on_ending(view, emissions.numbers[ending.position], ending, ending.position in rejected)
            self._pump(self._plans[view.route])
            self._say_if_empty(view)

    def _keep(self, emissions: Emissions, message: Frames, rejected: list[int]) -> None:
        for position, payload in enumerate(codec.pieces(emissions.lengths, message[3])):
            number = emissions.numbers[position]
            if payload and position not in rejected and not self._shelf.append(number, payload):
                log.warning("kept_request_dropped", number=number)  # no room, and nothing that had ended to make some

    def _check_rejected(self, view: ReplicaView, emissions: Emissions, position: int) -> None:
        """Late entries are dropped; a gap or a repeat in a current attempt ends its request, rather than hang it."""
        request = self._table.get(emissions.numbers[position])
        if request is not None and request.slot == view.slot and request.attempt == emissions.attempts[position]:
            self.num_internal_errors += 1
            log.error("emission_out_of_order", slot=view.slot, index=emissions.indexes[position])
            why = "its worker's results came out of order"
            self._end(request, RequestState.FAILED, Failed(request.name, Code.INTERNAL, why))

    def _on_ending(self, view: ReplicaView, number: int, ending: Ending, is_rejected: bool) -> None:
        request = self._table.get(number)
        view.release(number, request.num_ids if request is not None else 0)
        if request is None or is_rejected or ending.outcome == Outcome.WITHDRAWN:
            return
        if ending.outcome == Outcome.FINISHED:
            self._admission.observe_prompt(request.route, len(request.body), ending.num_prompt_tokens)
            self._metrics.observe_usage(request, ending)
            self._forget(request, RequestState.FINISHED, ending.reason)
        else:
            self._forget(request, RequestState.FAILED, "refused" if ending.outcome == Outcome.REFUSED else "")

    def _on_report(self, view: ReplicaView, told: Report) -> None:
        if told.epoch != view.epoch:
            return
        view.report = told
        self._metrics.observe_report(view.route, told)
        plan = self._plans[view.route]
        plan.router.observe(view.slot, view.epoch, told.busy_s, told.step, told.num_tokens)
        if view.is_clogged:
            view.is_clogged = False
            self._pump(plan)

    # What the supervisor says.

    def _on_expect(self, order: Expect) -> None:
        self._replicas.expect(order)

    def _on_admit(self, order: Admit) -> None:
        view = self._replicas.current(order.slot, order.epoch)
        if view is not None:
            view.is_admitted = True
            view.admitted_at = self._clock.now()
            self._pump(self._plans[view.route])

    def _on_pause(self, order: Pause) -> None:
        view = self._replicas.current(order.slot, order.epoch)
        if view is not None:
            view.is_paused = True
            self._say_if_empty(view)

    def _say_if_empty(self, view: ReplicaView) -> None:
        if view.is_paused and not view.in_flight:
            self._supervise(Emptied(view.slot, view.epoch))

    def _on_lost(self, order: Lost) -> None:
        view = self._replicas.current(order.slot, order.epoch)
        if view is None:
            return
        self._replicas.forget(order.slot)
        for number in view.in_flight:
            request = self._table.get(number)
            if request is not None:
                why = f"{WORKER_LOST} ({order.reason})" if order.reason else WORKER_LOST
                self._end(request, RequestState.FAILED, Failed(request.name, Code.WORKER_LOST, why, "", 0.1))

    def _on_close(self, _: Close) -> None:
        self._is_closing = True
        if not len(self._table):
            self._supervise(Drained())

    def _on_placed(self, placed: Placed) -> None:
        """What waits for a route that nobody will serve is told so, rather than left to wait."""
        self._placed = placed
        self._hopeless = {each.route for each in placed.routes if each.state == "failed"}
        if self._hopeless:
            why = "no replica of its route can serve any more"
            for request in [each for each in self._table if each.route in self._hopeless]:
                if request.state is RequestState.QUEUED:
                    failed = Failed(request.name, Code.UNAVAILABLE, why, retry_after_s=10.0)
                    self._end(request, RequestState.FAILED, failed)

    def _on_ask_status(self, question: AskStatus) -> None:
        self._supervise(StatusTold(question.question, self.status()))

    def _on_turn(self, asked: Turn) -> None:
        self._turn = asked.number

    def _flush(self) -> None:
        self._desk.flush()
        if self._turn:
            self._supervise(Turned(self._turn))
            self._turn = 0

    # What anybody may ask.

    def models(self) -> ModelList:
        """The routes, as placed by the supervisor."""
        aliases = {route: plan.config.aliases for route, plan in self._plans.items()}
        return status.models(self._placed, self._replicas.by_slot.values(), aliases)

    def status(self) -> StatusReport:
        """The supervisor's account, completed by what only the front knows. Changes nothing."""
        queued = {route: len(plan.order) for route, plan in self._plans.items()}
        views = self._replicas.by_slot
        speeds = {slot: self._plans[view.route].router.tokens_per_s(slot) for slot, view in views.items()}
        identity = (__version__, os.getpid(), self._clock.now() - self._started_at)
        return status.assemble(self._placed, identity, queued, (views, speeds), self.statistics())

    def metrics(self) -> bytes:
        """Everything that is measured, in Prometheus' text format. Changes the averages that are over time."""
        queued = {route: len(plan.order) for route, plan in self._plans.items()}
        return self._metrics.render(self.status(), self._replicas.by_slot, queued, self._clock.now())

    def statistics(self) -> Counters:
        """Everything that is counted. Changes nothing."""
        journal_tokens = sum(request.num_ids for request in self._table)
        own = (self.num_refused, self.num_internal_errors, journal_tokens)
        return status.counters(self._table.statistics(), self._desk, own)


def _tenant(session: Session, head: OwnerHead) -> str:
    """Whose a kept request is: what a peer says of itself counts only where it showed no key."""
    return head.tenant if session.key is None else session.key.tenant


def _refusal(error: EngineError, request: str) -> Error:
    return Error(error.code, error.message, error.field, request, error.retry_after_s)


def _limits(config: FrontConfig) -> Limits:
    return Limits(config.body_bytes_max, config.session_requests_max, config.requests_max)
