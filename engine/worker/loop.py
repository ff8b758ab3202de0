"""Owns the worker's one loop: receive, schedule, launch step N+1, emit the results of step N while the device is busy.

Knows frames, the scheduler and the runner protocol; no model and no weights. Called by `worker/main.py`. A fault of
one request fails that request; a fault in a step ends the process, and the supervisor starts another.
"""

import signal
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from typing import Final

import msgspec
import zmq

from engine.llm.batch import rows
from engine.llm.runner import Handle
from engine.llm.scheduler import Emission, Scheduler, Step
from engine.llm.sequence import FinishReason, Sequence
from engine.worker.intake import Intake
from engine.worker.live import Answer as Choice
from engine.worker.live import Live, StepEntries, told
from engine.worker.loaded import Loaded
from ipc import codec
from ipc.channel import Channel, Sent
from ipc.errors import Code, EngineError, ProtocolError
from ipc.health import PageWriter, Phase
from ipc.messages import (
    GAP_BOUNDS,
    Answer,
    Ask,
    Assign,
    Error,
    Failed,
    Generate,
    Kind,
    Outcome,
    Report,
    Tokenize,
    Tokenized,
    TokenLogprob,
    Withdraw,
)

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
        self._intake = Intake(loaded, scheduler.limits.max_model_len, scheduler.limits.max_num_seqs)
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
        self._num_non_finite = 0
        self._num_computed = 0
        self._gaps = [0] * (len(GAP_BOUNDS) + 1)
        self._gaps_s = 0.0
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
        while self._num_stops == 0 or self._lives or len(self._intake):
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
            elif kind is Kind.ASK:
                self._on_ask(codec.decode(frames[1], Ask, "head"), frames[2])
            elif kind is Kind.ERROR:
                raise SystemExit(75)  # the front does not know this worker: another one has its slot
        if len(self._intake):
            self._collect()
        self._send_entries()

    def _on_ask(self, ask: Ask, body: bytes) -> None:
        """Tokens of a text or a text of tokens: nothing is scheduled."""
        self._answer(ask, lambda: self._intake.ask(ask, codec.decode(body, Tokenize)))

    def _answer(self, ask: Ask, make: Callable[[], Tokenized | None]) -> None:
        """The boundary around one question: whatever is wrong with it is told to who asked."""
        reply: Tokenized | Error | None
        try:
            reply = make()
            if reply is None:
                return
        except EngineError as error:
            reply = Error(error.code, error.message, error.field, ask.request, error.retry_after_s)
        except ProtocolError as error:
            reply = Error(error.code, error.message, error.field, ask.request)
        except Exception as error:  # noqa: BLE001 - the boundary around one request
            reply = Error(Code.INTERNAL.value, f"{type(error).__name__}: {error}", "", ask.request)
        head = Answer(self._settings.epoch, ask.session, ask.request, isinstance(reply, Error))
        self._send([codec.ENVELOPES[Kind.ANSWER], codec.encode(head), codec.encode(reply)])

    def _on_assign(self, assign: Assign, body: bytes) -> None:
        self._try(assign, lambda: self._intake.take(assign, codec.decode(body, Generate)))

    def _start(self, live: Live) -> None:
        """All answers of a request, or none. Raises EngineError naming the field."""
        added: list[Sequence] = []
        try:
            for answer in live.answers:
                self._scheduler.add(answer.sequence)
                added.append(answer.sequence)
        except EngineError:
            for sequence in added:
                self._scheduler.cancel(sequence.request, sequence.choice)
            raise
        self._lives[live.number] = live
        first = live.answers[0].sequence
        if live.is_echo and (not first.is_scored or first.num_prompt_tokens == 1):  # nothing of it has to be computed
            self._entries_of(live.session).add_echo(live, self._tokenizer.token_bytes)

    def _collect(self) -> None:
        """Start what the tokenizer's thread has finished."""
        for assign, future in self._intake.done():
            self._try(assign, future.result)
        for ask, answer in self._intake.answered():
            self._answer(ask, answer.result)

    def _try(self, assign: Assign, make: Callable[[], Live | None]) -> None:
        """The boundary around one request: whatever is wrong with it ends it alone."""
        try:
            live = make()
            if live is not None:
                self._start(live)
        except (EngineError, ProtocolError) as error:
            self._refuse(assign, Failed(assign.request, error.code, error.message, error.field))
        except Exception as error:  # noqa: BLE001 - the boundary around one request
            self._refuse(assign, Failed(assign.request, "internal", f"{type(error).__name__}: {error}"))

    def _refuse(self, assign: Assign, event: Failed) -> None:
        live = Live(assign.number, assign.attempt, assign.session, assign.request)
        self._entries_of(assign.session).add_failure(live, event, Outcome.REFUSED)

    def _on_withdraw(self, withdraw: Withdraw) -> None:
        assign = self._intake.withdraw(withdraw.number, withdraw.attempt)
        if assign is not None:
            live = Live(assign.number, assign.attempt, assign.session, assign.request)
            self._entries_of(live.session).add_withdrawn(live)
            return
        found = self._lives.get(withdraw.number)
        if found is None or found.attempt != withdraw.attempt:
            return  # it has ended, and its end is on the way
        self._forget(found)
        self._entries_of(found.session).add_withdrawn(found)

    def _forget(self, live: Live) -> None:
        """End what still runs of it."""
        del self._lives[live.number]
        for answer in live.answers:
            self._scheduler.cancel(live.number, answer.sequence.choice)

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
            self._num_computed += step.num_tokens
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
        logprobs = self._read_scores(flight)
        stopped = self._detokenize(emissions, logprobs)
        if not stopped:
            self._launch()
        self._send_entries()

    def _read_scores(self, flight: _InFlight) -> dict[tuple[int, int], list[TokenLogprob]]:
        """Log probabilities of a step's tokens by request and choice; those of prompts are kept, then echoed."""
        logprobs: dict[tuple[int, int], list[TokenLogprob]] = {}
        scores, chunks = flight.handle.scores, flight.step.chunks
        if scores is None:
            return logprobs
        token_bytes = self._tokenizer.token_bytes
        for index, score in scores.sampled.items():
            sequence = chunks[index].sequence
            logprobs[sequence.request, sequence.choice] = [told(score, token_bytes)]
        for index, prompt in scores.prompt.items():
            sequence, live = chunks[index].sequence, self._lives.get(chunks[index].sequence.request)
            if live is None or live.has_echoed:
                continue
            # A prompt that is computed again, after a preemption, was scored up to some position already.
            live.prompt_scores += prompt[max(0, len(live.prompt_scores) - chunks[index].start) :]
            if any(isnan(score.logprob) for score in prompt):
                self._fail(live)
            elif len(live.prompt_scores) == sequence.num_prompt_tokens - 1:
                self._entries_of(live.session).add_echo(live, token_bytes)
        return logprobs

    def _wait(self, handle: Handle) -> None:
        """Until the device is done, take in what the front says, so that a cancel does not wait for the step."""
        while not handle.poll():
            ready_at = handle.ready_at
            timeout_s = 0.001 if ready_at is None else ready_at - time.monotonic()
            if timeout_s < 0.001:
                return
            if self._channel.socket.poll(int(timeout_s * 1e3), zmq.POLLIN):
                self._receive()

    def _detokenize(self, emissions: list[Emission], logprobs: dict[tuple[int, int], list[TokenLogprob]]) -> bool:
        """Turn committed ids into entries. True when a stop string was found, which changes what may run next."""
        stopped = False
        now = time.monotonic()
        gaps = self._gaps
        for emission in emissions:
            sequence, ids, reason = emission.sequence, emission.ids, emission.reason
            live = self._lives.get(sequence.request)
            if live is None:
                continue
            if reason is FinishReason.FAILED:
                self._fail(live)
                continue
            answer = live.answers[sequence.choice]
            detokenizer = answer.detokenizer
            if answer.last_at:
                gap_s = now - answer.last_at
                gaps[bisect_left(GAP_BOUNDS, gap_s)] += 1
                self._gaps_s += gap_s
            answer.last_at = now
            text = detokenizer.push(ids)
            if detokenizer.is_stopped and reason is None:
                self._scheduler.finish(sequence.request, FinishReason.STOP, sequence.choice)
                reason, stopped = FinishReason.STOP, True
            scores = logprobs.get((sequence.request, sequence.choice), []) if logprobs else []
            if reason is None:
                self._entries_of(live.session).add_delta(live, answer, ids, text, scores)
            else:
                self._end(live, answer, ids, text, (reason, scores))
        return stopped

    def _end(
        self, live: Live, answer: Choice, ids: list[int], text: str, how: tuple[FinishReason, list[TokenLogprob]]
    ) -> None:
        """An answer has ended, and with the last one its request."""
        reason, scores = how
        entries = self._entries_of(live.session)
        if not answer.detokenizer.is_stopped:
            text += answer.detokenizer.finish()
        answer.reason = reason.value
        if all(each.reason for each in live.answers):
            del self._lives[live.number]
        entries.add_last(live, answer, ids, text, scores)

    def _fail(self, live: Live) -> None:
        """Its logits cannot be sampled from: it ends, its neighbours go on."""
        self._num_non_finite += 1
        self._forget(live)
        failed = Failed(live.name, Code.INTERNAL.value, "the model's logits are not finite, or no token is left")
        self._entries_of(live.session).add_failure(live, failed, Outcome.FAILED)

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
        is_idle = not self._lives and not len(self._intake)
        if now < self._report_at and is_idle == self._was_idle:
            return
        self._was_idle = is_idle
        self._report_at = now + (IDLE_REPORT_S if is_idle else REPORT_S)
        counted = self._scheduler.statistics()
        self._page.gauges(
            counted.num_running, counted.num_waiting, counted.num_free_blocks, self._scheduler.pool.num_blocks
        )
        report = Report(
            self._settings.epoch,
            self._num_steps,
            self._busy_s,
            self._num_tokens,
            counted.num_running,
            counted.num_waiting,
            counted.num_free_blocks,
            counted.num_cached_blocks,
            counted.num_preemptions,
            counted.num_hit_tokens,
            is_idle,
            self._num_non_finite,
            self._gaps,
            self._gaps_s,
            self._num_computed,
            self._scheduler.num_recomputed,
        )
        self._gaps, self._gaps_s = [0] * (len(GAP_BOUNDS) + 1), 0.0
        self._send([codec.ENVELOPES[Kind.REPORT], codec.encode(report)])

    def _idle(self) -> None:
        """Nothing owes a token: audit, then sleep until the front says something."""
        self._page.enter(Phase.IDLE, self._settings.hang_floor_s)
        now = time.monotonic()
        if now >= self._audit_at and not self._lives:
            self._audit_at = now + AUDIT_S
            self._scheduler.audit()
        timeout_s = 0.005 if self._outbox or len(self._intake) else IDLE_POLL_S
        self._channel.socket.poll(int(timeout_s * 1e3), zmq.POLLIN)
