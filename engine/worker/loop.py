"""Owns the worker's one loop: receive, schedule, launch step N+1, emit the results of step N while the device is busy.

Knows frames, the scheduler and the runner protocol; no model and no weights. Called by `worker/main.py`. A fault of
one request fails that request; a fault in a step ends the process, and the supervisor starts another.
"""

import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from engine.llm.batch import rows
from engine.llm.blocks import namespace_key
from engine.llm.detokenizer import Detokenizer
from engine.llm.runner import Handle
from engine.llm.scheduler import Emission, Scheduler, Step
from engine.llm.sequence import FinishReason, Sampling, Sequence
from engine.worker.live import Live, StepEntries
from engine.worker.loaded import Loaded
from ipc import codec
from ipc.channel import Channel, Sent
from ipc.errors import Code, EngineError, ProtocolError
from ipc.health import PageWriter, Phase
from ipc.messages import Assign, Failed, Finished, Generate, Kind, Outcome, Report, Usage, Withdraw

REPORT_S: Final = 0.1
IDLE_REPORT_S: Final = 1.0
IDLE_POLL_S: Final = 0.2
AUDIT_S: Final = 1.0
HANG_FACTOR: Final = 8.0  # a step may take this many times what it was expected to
OUTBOX_MAX: Final = 1024  # messages the front has not taken; over it the loop computes nothing new
RECEIVE_MAX: Final = 256  # messages taken in between two steps


@dataclass(slots=True)
class _InFlight:
    step: Step
    handle: Handle


class LoopSettings(msgspec.Struct, frozen=True):
    """`depth` steps may be on the device at once; a silent main loop is a hang after `hang_floor_s`."""

    epoch: int
    depth: int
    hang_floor_s: float


class WorkerLoop:
    """Continuous batching over one runner."""

    def __init__(
        self, channel: Channel, page: PageWriter, scheduler: Scheduler, loaded: Loaded, settings: LoopSettings
    ) -> None:
        self._channel = channel
        self._page = page
        self._scheduler = scheduler
        self._runner = loaded.runner
        self._tokenizer = loaded.tokenizer
        self._template = loaded.template
        self._version = loaded.version
        self._settings = settings
        self._lives: dict[int, Live] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._outbox: deque[list[bytes]] = deque()
        self._entries: dict[int, StepEntries] = {}
        self._num_steps = 0
        self._num_tokens = 0
        self._busy_s = 0.0
        self._step_s = 0.0  # smoothed time of a step: what the next one is expected to take
        self._busy_since = 0.0
        self._report_at = 0.0
        self._audit_at = 0.0
        self._num_stops = 0
        self._was_idle = True

    def on_sigterm(self, *_: object) -> None:
        """First: finish what runs, then leave. Second: leave now."""
        self._num_stops += 1
        if self._num_stops > 1:
            raise SystemExit(0)

    def run(self) -> None:
        """Serve until told to stop. Returns when everything taken in has ended."""
        signal.signal(signal.SIGTERM, self.on_sigterm)
        while self._num_stops == 0 or self._lives:
            self._turn()
        self._page.enter(Phase.EXITING, self._settings.hang_floor_s)

    def _turn(self) -> None:
        self._receive()
        self._flush()
        self._launch()
        if self._in_flight:
            self._finish_oldest()
        else:
            self._idle()
        self._report()

    # What the front says.

    def _receive(self) -> None:
        for _ in range(RECEIVE_MAX):
            frames = self._channel.receive_nowait()
            if frames is None:
                break
            kind = codec.kind_of(frames)
            if kind is Kind.ASSIGN:
                self._on_assign(codec.decode(frames[1], Assign, "head"), frames[2])
            elif kind is Kind.WITHDRAW:
                self._on_withdraw(codec.decode(frames[1], Withdraw, "head"))
            elif kind is Kind.ERROR:
                raise SystemExit(75)  # the front does not know this worker: another one has its slot
        self._send_entries()

    def _on_assign(self, assign: Assign, body: bytes) -> None:
        live: Live | None = None
        try:
            live = self._take_in(assign, codec.decode(body, Generate))
        except (EngineError, ProtocolError) as error:
            self._refuse(assign, Failed(assign.request, error.code, error.message, error.field))
        except Exception as error:  # noqa: BLE001 - the boundary around one request
            self._refuse(assign, Failed(assign.request, "internal", f"{type(error).__name__}: {error}"))
        if live is not None:
            self._lives[assign.number] = live

    def _take_in(self, assign: Assign, generate: Generate) -> Live:
        """One request as a sequence. Raises EngineError naming the field."""
        tokenizer = self._tokenizer
        prompt_ids = self._prompt_ids(generate)
        if generate.top_p == 0 and generate.temperature > 0:
            raise EngineError(Code.INVALID, "top_p 0 leaves nothing to sample from", "top_p")
        if generate.min_tokens > generate.max_tokens:
            message = f"min_tokens is {generate.min_tokens}, over max_tokens, {generate.max_tokens}"
            raise EngineError(Code.INVALID, message, "min_tokens")
        sequence = Sequence(
            request=assign.number,
            attempt=assign.attempt,
            token_ids=list(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            max_tokens=generate.max_tokens,
            min_tokens=generate.min_tokens,
            ignore_eos=generate.ignore_eos,
            stop_ids=frozenset(generate.stop_ids),
            eos_ids=tokenizer.eos_ids,
            seed=assign.seed,
            choice=0,
            namespace=namespace_key(self._version, "", "", assign.tenant, generate.cache_salt),
            sampling=Sampling(generate.temperature, generate.top_k, generate.top_p, generate.min_p)
            if generate.temperature
            else None,
        )
        detokenizer = Detokenizer(tokenizer, tuple(generate.stop))
        self._scheduler.add(sequence)
        return Live(assign.number, assign.attempt, assign.session, assign.request, detokenizer, generate.stream)

    def _prompt_ids(self, generate: Generate) -> list[int]:
        """The prompt, or the conversation by the model's template. Raises EngineError naming the field."""
        tokenizer, prompt = self._tokenizer, generate.prompt
        if generate.messages:
            if prompt:
                raise EngineError(Code.INVALID, "prompt and messages exclude each other", "messages")
            if self._template is None:
                raise EngineError(Code.INVALID, "this model has no chat template", "messages")
            turns = [{"role": each.role, "content": each.content} for each in generate.messages]
            return self._template.ids(turns, tokenizer.encode)
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        tokenizer.check(prompt)
        return prompt

    def _refuse(self, assign: Assign, event: Failed) -> None:
        live = Live(assign.number, assign.attempt, assign.session, assign.request, Detokenizer(self._tokenizer), True)
        self._entries_of(assign.session).add_end(live, [], event, Outcome.REFUSED, 0)

    def _on_withdraw(self, withdraw: Withdraw) -> None:
        live = self._lives.get(withdraw.number)
        if live is None or live.attempt != withdraw.attempt:
            return  # it has ended, and its end is on the way
        del self._lives[withdraw.number]
        self._scheduler.cancel(withdraw.number)
        self._entries_of(live.session).add_withdrawn(live.number, live.attempt, live.num_emitted)

    # Steps.

    def _launch(self) -> None:
        """Fill the device: schedule and launch until `depth` steps are on it."""
        while len(self._in_flight) < self._settings.depth and len(self._outbox) < OUTBOX_MAX:
            step = self._scheduler.schedule()
            if step is None:
                return
            now = time.monotonic()
            if not self._in_flight:
                self._busy_since = now
            self._num_steps += 1
            self._page.step(self._num_steps, [chunk.sequence.request for chunk in step.chunks])
            self._page.enter(Phase.STEPPING, self._patience_s())
            self._in_flight.append(_InFlight(step, self._runner.launch(rows(step))))

    def _patience_s(self) -> float:
        return max(self._settings.hang_floor_s, HANG_FACTOR * self._step_s * self._settings.depth)

    def _finish_oldest(self) -> None:
        """Wait for the oldest step, commit it, put the next on the device, then emit."""
        flight = self._in_flight[0]
        self._page.enter(Phase.STEPPING, self._patience_s())
        self._wait(flight.handle)
        sampled = flight.handle.wait()
        self._in_flight.popleft()
        now = time.monotonic()
        took_s, self._busy_since = now - self._busy_since, now
        self._busy_s += took_s
        self._step_s = took_s if not self._step_s else 0.8 * self._step_s + 0.2 * took_s
        emissions = self._scheduler.commit(flight.step, sampled)
        self._num_tokens += len(emissions)
        stopped = self._detokenize(emissions)
        if not stopped:
            self._launch()
        self._send_entries()

    def _wait(self, handle: Handle) -> None:
        """Until the device is done, take in what the front says, so that a cancel does not wait for the step."""
        while not handle.poll():
            ready_at = handle.ready_at
            timeout_s = 0.001 if ready_at is None else ready_at - time.monotonic()
            if timeout_s < 0.001:
                return
            if self._channel.socket.poll(int(timeout_s * 1e3), zmq.POLLIN):
                self._receive()

    def _detokenize(self, emissions: list[Emission]) -> bool:
        """Turn committed ids into entries. True when a stop string was found, which changes what may run next."""
        stopped = False
        for emission in emissions:
            sequence, ids, reason = emission.sequence, emission.ids, emission.reason
            live = self._lives.get(sequence.request)
            if live is None:
                continue
            detokenizer = live.detokenizer
            text = detokenizer.push(ids)
            if detokenizer.is_stopped and reason is None:
                self._scheduler.finish(sequence.request, FinishReason.STOP)
                reason, stopped = FinishReason.STOP, True
            if reason is None:
                self._entries_of(live.session).add_delta(live, ids, text)
            else:
                self._end(live, sequence, ids, text, reason)
        return stopped

    def _end(self, live: Live, sequence: Sequence, ids: list[int], text: str, reason: FinishReason) -> None:
        del self._lives[live.number]
        if reason is FinishReason.FAILED:
            failed = Failed(live.name, Code.INTERNAL.value, "the model's logits are not finite")
            self._entries_of(live.session).add_end(live, [], failed, Outcome.FAILED, sequence.num_prompt_tokens)
            return
        detokenizer = live.detokenizer
        if not detokenizer.is_stopped:
            text += detokenizer.finish()
        num_completion = live.num_emitted + len(ids)
        usage = Usage(sequence.num_prompt_tokens, num_completion, sequence.num_cached_tokens)
        index = 0 if not live.is_stream else live.num_emitted
        event = Finished(
            live.name,
            index,
            "".join(live.held_text) + text,
            live.held_ids + ids,
            reason.value,
            usage,
            sequence.seed,
            detokenizer.matched or "",
        )
        entries = self._entries_of(live.session)
        entries.add_end(live, ids, event, Outcome.FINISHED, sequence.num_prompt_tokens)

    # What the front hears.

    def _entries_of(self, session: int) -> StepEntries:
        entries = self._entries.get(session)
        if entries is None:
            entries = self._entries[session] = StepEntries(session)
        return entries

    def _send_entries(self) -> None:
        """One Emissions message per session."""
        if self._entries:
            for entries in self._entries.values():
                self._send(entries.frames(self._settings.epoch, self._num_steps))
            self._entries.clear()

    def _send(self, frames: list[bytes]) -> None:
        """In order, and never lost: what the socket does not take waits."""
        if self._outbox or self._channel.send_nowait(frames) is not Sent.YES:
            self._outbox.append(frames)

    def _flush(self) -> None:
        outbox = self._outbox
        while outbox and self._channel.send_nowait(outbox[0]) is Sent.YES:
            outbox.popleft()

    def _report(self) -> None:
        now = time.monotonic()
        is_idle = not self._lives
        if now < self._report_at and is_idle == self._was_idle:
            return
        self._was_idle = is_idle
        self._report_at = now + (IDLE_REPORT_S if is_idle else REPORT_S)
        told = self._scheduler.statistics()
        self._page.gauges(told.num_running, told.num_waiting, told.num_free_blocks, self._scheduler.pool.num_blocks)
        report = Report(
            self._settings.epoch,
            self._num_steps,
            self._busy_s,
            self._num_tokens,
            told.num_running,
            told.num_waiting,
            told.num_free_blocks,
            told.num_cached_blocks,
            told.num_preemptions,
            told.num_hit_tokens,
            is_idle,
        )
        self._send([codec.ENVELOPES[Kind.REPORT], codec.encode(report)])

    def _idle(self) -> None:
        """Nothing owes a token: audit, then sleep until the front says something."""
        self._page.enter(Phase.IDLE, self._settings.hang_floor_s)
        now = time.monotonic()
        if now >= self._audit_at and not self._lives:
            self._audit_at = now + AUDIT_S
            self._scheduler.audit()
        timeout_s = 0.005 if self._outbox else IDLE_POLL_S
        self._channel.socket.poll(int(timeout_s * 1e3), zmq.POLLIN)
