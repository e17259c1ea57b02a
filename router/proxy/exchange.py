"""One request and its answer, from the first byte to the last: the hot path.

The machine is the table in phases.py. Callbacks come from both sides (net/exchange_api.py): the client's connection
hands over the request and tells when the client leaves or is slow; an engine's connection tells what it answers; the
clock tells when a phase took too long. Each attempt ends in `_end_attempt`, each exchange in `_finish`, once, whoever
comes first; everything counted is given back there and nowhere else.

What is unusual: the engine's head is held back until the first byte of its body. Until then nothing was promised to
the client, and a failure of any kind can be mended by a repeat on another backend (retry.py says when). After it an
error can only be told inside the stream, by an error event and a connection cut without its proper end.

Nothing here waits, and nothing is collected: body bytes pass as they came, one callback for each piece.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from native.body_framing import BodyFramer, Framing
from router.backends.backend import Backend, State
from router.backends.in_flight import InFlight
from router.backends.registry import Pool
from router.errors import (
    RouterError,
    Source,
    invalid_api_key,
    no_backend,
    queue_timeout,
    upstream_error,
    upstream_timeout,
)
from router.metrics import CONTENT_TYPE as METRICS_CONTENT_TYPE
from router.net.downstream import Downstream
from router.net.upstream import Upstream
from router.proxy.access_log import AccessLine
from router.proxy.api_keys import Caller, needs_key
from router.proxy.attempt import Attempt, HeldAnswer, LastFailure, StreamPeek
from router.proxy.candidates import fit_candidates, worth_waiting
from router.proxy.intake import ModelsAwaited, describe_outage, outage_retry_s, read_routing
from router.proxy.local_answers import JSON_TYPE, SCRAPE, LocalAnswer, local_answer
from router.proxy.phases import MOVES, EndedBy, Phase
from router.proxy.prompt_question import PromptQuestion
from router.proxy.retry import may_repeat
from router.proxy.services import Services
from router.proxy.trace import Trace
from router.strategies.held_line import HeldLine
from router.strategies.strategy import Choice, End, Outcome, Reason, RoutingRequest
from router.wire.http_head import (
    RequestHead,
    ResponseHead,
    render_own_answer,
    render_request_head,
    render_response_head,
)
from router.wire.paths import ADAPTER_PATHS, MESSAGES_PATH, PathKind, path_kind
from router.wire.sse import First, first_event
from router.wire.usage import read_usage

logger = logging.getLogger(__name__)

METRICS_TYPE: Final = METRICS_CONTENT_TYPE.encode()
BUSY_STATUSES: Final = frozenset(
    (429, 503)
)  # the engine's own limits: no sign of illness, but another one may have room

# Names of this module: to look a member up in its Enum costs 0.2 us each time, a Final nothing.
READ_HEAD: Final = Phase.READ_HEAD
READ_BODY: Final = Phase.READ_BODY
QUEUED: Final = Phase.QUEUED
CONNECTING: Final = Phase.CONNECTING
SENDING: Final = Phase.SENDING
AWAIT_HEAD: Final = Phase.AWAIT_HEAD
STREAMING: Final = Phase.STREAMING
DONE: Final = Phase.DONE
CHANGE: Final = PathKind.CHANGE
TRIAL: Final = State.TRIAL
RETRY: Final = Reason.RETRY
COMPLETE: Final = End.COMPLETE
FAILED: Final = End.FAILED
CANCELLED: Final = End.CANCELLED
BY_CLIENT: Final = EndedBy.CLIENT
BY_UPSTREAM: Final = EndedBy.UPSTREAM
BY_GATEWAY: Final = EndedBy.GATEWAY
CHUNKED: Final = Framing.CHUNKED
UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE


class Exchange:
    """Implements DownstreamEvents, UpstreamEvents, ConnectEvents and Waiter."""

    __slots__ = (
        "_attempt",
        "_attempts",
        "_bytes_out",
        "_caller",
        "_cancel_check",
        "_choice",
        "_client_slow",
        "_dechunker",
        "_downstream",
        "_failure",
        "_first_byte_at",
        "_fleet_version",
        "_framer",
        "_head",
        "_kind",
        "_last_byte_at",
        "_load",
        "_phase",
        "_question",
        "_queued_s",
        "_received_at",
        "_request",
        "_request_id",
        "_s",
        "_served_by",
        "_started_at",
        "_status",
        "_stranger",
        "_stream",
        "_trace",
        "_tried",
        "_tunnel",
        "_upstream_body",
        "_was_held",
        "held_for",
        "held_s",
        "pool",
        "queued_at",
    )

    def __init__(self, services: Services, downstream: Downstream, head: RequestHead | None) -> None:
        self._s = services
        self._downstream = downstream
        self._head = head
        self._phase: Phase = READ_HEAD
        self._kind = CHANGE
        self._request_id = (head.request_id if head is not None else None) or services.next_request_id()
        self._caller: Caller | None = None
        self._stranger = False  # it needs a key and has none that is known
        if services.api_keys is not None and head is not None and needs_key(head):
            self._caller = services.api_keys.caller(head)
            self._stranger = self._caller is None
        # routing
        self.pool: Pool = services.registry.any_pool()
        self._request: RoutingRequest | None = None  # None in the queue: nobody has told yet that he serves it
        self._fleet_version = -1  # of the registry, when that was so
        self.held_s: float | None = None
        self.held_for: Backend | None = None
        self._was_held = False
        self._question: PromptQuestion | None = None  # it waits for the answer before it may be placed
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._choice: Choice | None = None  # the last one
        self._load = 0  # in flight on the chosen backend at the moment of the choice
        self._tried: list[Backend] = []
        self._failure: LastFailure | None = None
        self._cancel_check: Callable[[], object] | None = None
        # what goes to the engine, kept while a repeat is possible
        self._upstream_body = b""
        # the answer
        self._status = 0
        self._served_by: Choice | None = None
        self._framer: BodyFramer | None = None  # knows where in its framing the body under way stands
        self._dechunker: BodyFramer | None = None
        self._stream = False  # server-sent events
        self._tunnel = False
        self._client_slow = False
        self._bytes_out = 0
        # times, by the clock
        self._started_at = self._received_at = services.now()
        self.queued_at = 0.0
        self._queued_s = 0.0
        self._first_byte_at: float | None = None
        self._last_byte_at = 0.0
        self._trace: Trace | None = services.tracer.begin(head) if services.tracer is not None else None
        services.exchanges.add(self)
        if head is not None:
            self._enter(READ_BODY)

    # -- the request --------------------------------------------------------------------------------------------------

    def refusal(self) -> RouterError | None:
        return invalid_api_key() if self._stranger else None

    def on_request(self, body: bytes) -> None:
        s = self._s
        head = self._head
        assert head is not None
        self._received_at = now = s.now()
        if self._stranger:
            self._answer_error(invalid_api_key())
            return
        self._upstream_body = body
        try:
            answer = local_answer(head.method, head.path, s)
            if answer is not None:
                if answer is SCRAPE:
                    s.scrape(self._on_scraped)
                else:
                    self._answer_locally(answer)
                return
            self._kind = path_kind(head.method, head.path)
            self._route()
        except ModelsAwaited:
            self.pool = s.registry.waiting_pool()
            self._fleet_version = s.registry.version
        except RouterError as error:
            self._answer_error(error)
            return
        except Exception:
            self.on_broken()
            return
        s.budget.earn()
        self._enter(QUEUED)
        if self._asks_about_prompt():
            self._downstream.set_deadline(s.settings.queue_timeout_s)
        else:
            self._queue(now)

    def _asks_about_prompt(self) -> bool:
        """Whether the request waits for what a strategy can choose better by: its token ids, and where they are."""
        s = self._s
        request, strategy = self._request, s.token_strategy
        if request is None or strategy is None or s.tokens is None:
            return False
        patience_s = strategy.token_patience_s(request, self.pool.candidates)
        if patience_s <= 0.0:
            return False
        assert self._head is not None
        question = PromptQuestion(s, self.pool, request, self._on_prompt_known)
        if not question.ask(self._head.path.decode("ascii", "replace"), self._upstream_body, s.now() + patience_s):
            return False
        self._question = question
        return True

    def _on_prompt_known(self) -> None:
        self._question = None
        try:
            self._queue(self._s.now())
        except Exception:
            self.on_broken()

    def _queue(self, now: float) -> None:
        s = self._s
        self.queued_at = now
        s.admission.enter(self, now)
        if self._phase is QUEUED:
            self._downstream.set_deadline(s.settings.queue_timeout_s)

    def _route(self) -> None:
        assert self._head is not None
        self.pool, self._request, self._upstream_body = read_routing(
            self._s, self._head, self._kind, self._upstream_body, self._received_at
        )

    def on_refused(self, error: RouterError) -> None:
        if self._head is not None:
            self._head.keep_alive = False  # its bytes are not all read
        self._answer_error(error)

    def on_rejected(self, error: RouterError) -> None:
        self._answer_error(error)

    # -- placing ------------------------------------------------------------------------------------------------------

    def try_place(self) -> bool:
        self.held_s = None
        try:
            if self._request is None and not self._now_known():
                return self._phase is DONE
            candidates = fit_candidates(self._s, self.pool, self._tried)
            assert self._request is not None
            if candidates and self._s.admission.full:
                return False
            choice = self._s.strategy.choose(self._request, candidates) if candidates else None
            if choice is not None:
                if self._s.line is not None and not self._attempts and self._is_held(self._s.line, choice):
                    return False
                self._start_attempt(choice)
            elif worth_waiting(self.pool, self._tried):
                return False
            else:
                self._give_up()
        except Exception:  # often called from the end of another exchange, which is not to blame
            self.on_broken()
        return True

    def _is_held(self, line: HeldLine, choice: Choice) -> bool:
        """Whether the request is kept here, since its best backend has enough to do."""
        over_s = line.over_s(choice.backend)
        if over_s <= 0.0:
            return False
        self.held_s = choice.uncached_s
        self.held_for = choice.backend
        if not self._was_held:
            self._was_held = True
            self._s.metrics.held += 1
        self._s.wake_held(over_s)
        return True

    def still_held(self) -> bool:
        line, backend = self._s.line, self.held_for
        if line is None or backend is None or not backend.serving:
            return False
        over_s = line.over_s(backend)
        if over_s > 0.0:
            self._s.wake_held(over_s)
        return over_s > 0.0

    def _now_known(self) -> bool:
        """Whether the pool is known of one that came before the backends had told their models. If not it waits on, or
        was answered."""
        version = self._s.registry.version
        if self._fleet_version == version:
            return False  # asked of many again and again, and each would have its body read
        self._fleet_version = version
        try:
            self._route()
        except ModelsAwaited:
            return False
        except RouterError as error:
            self._answer_error(error)
            return False
        return True

    def _start_attempt(self, choice: Choice) -> None:
        s = self._s
        now = s.now()
        self._queued_s += now - self.queued_at
        backend = choice.backend
        if self._attempts:
            choice.reason = RETRY
        else:
            s.metrics.queue_time.observe(self._queued_s)
        self._attempts += 1
        self._choice = choice
        self._load = backend.in_flight
        attempt = self._attempt = Attempt(choice, InFlight(backend), s.strategy)
        if self._trace is not None:
            self._trace.begin_attempt(choice, now)
        if backend.state is TRIAL:
            attempt.trial = backend.trial_open = True
        s.admission.taken(now)
        s.passive_health.started(backend)
        attempt.strategy.placed(choice)
        s.metrics.decisions[s.settings.strategy_name, choice.reason] += 1
        s.decisions.add(self._request_id, self._attempts, self._load, now - self._received_at, choice)
        # a dead connection shows only after the request was written: what must not be sent twice gets a new one
        upstream = None if self._kind is CHANGE else s.pool.take(backend)
        if upstream is not None:
            attempt.reused = True
            self._send(upstream)
        else:
            self._connect()

    def _connect(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._enter(CONNECTING)
        self._downstream.set_deadline(self._s.settings.connect_s)
        attempt.connecting = self._s.connector.connect(attempt.choice.backend, self)

    def on_connected(self, upstream: Upstream) -> None:
        assert self._attempt is not None
        self._attempt.connecting = None
        try:
            self._send(upstream)
        except Exception:
            self.on_broken()

    def on_connect_failed(self, why: str, *, ours: bool = False) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.connecting = None
        backend = attempt.choice.backend
        if not ours:
            self._s.passive_health.connect_failed(backend)
        self._fail_attempt("connect", upstream_error(f"Backend {backend.name} cannot be reached: {why}."))

    def _send(self, upstream: Upstream) -> None:
        s = self._s
        head, attempt = self._head, self._attempt
        assert head is not None
        assert attempt is not None
        self._enter(SENDING)
        attempt.upstream = upstream
        backend = attempt.choice.backend
        if self._attempts == 1 and not attempt.sent:
            s.metrics.overhead.observe(s.now() - self._received_at - self._queued_s)
        attempt.sent = True
        body = self._upstream_body
        if self._caller is not None:
            head.drop(self._caller.headers)  # the key was for us
        raw = render_request_head(
            head,
            body_bytes=len(body),
            request_id=self._request_id,
            peer=self._downstream.peer,
            default_host=b"%b:%d" % (backend.host.encode(), backend.port),
            api_key=backend.api_key.encode() if backend.api_key is not None else None,
            traceparent=self._trace.traceparent() if self._trace is not None else None,
        )
        self._downstream.set_deadline(s.settings.first_byte_s)
        upstream.send(self, raw, body, to_head=head.method == b"HEAD")

    def on_sent(self) -> None:
        if self._phase is SENDING:
            self._enter(AWAIT_HEAD)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def on_response_head(self, head: ResponseHead) -> None:
        attempt = self._attempt
        assert attempt is not None
        assert self._head is not None
        attempt.status = head.status
        attempt.head = head
        if head.status == 101:
            if self._head.upgrade is None:
                self._lose_upstream("it switched protocols unasked")
                return
            self._begin_tunnel()
        elif head.status == 200:
            if head.event_stream:
                attempt.peek = StreamPeek(head)
            elif self._kind is CHANGE and self._head.path in ADAPTER_PATHS:
                attempt.judging = self._s.ask_models is not None
        elif head.status in BUSY_STATUSES or head.status == 500:
            attempt.judging = self._repeatable(sent=True)

    def on_response_body(self, data: bytes) -> None:
        if self._phase is STREAMING:
            self._forward(data)
            return
        attempt = self._attempt
        assert attempt is not None
        if attempt.judging:
            if not attempt.hold(data):
                attempt.judging = False
                self._commit()
        elif attempt.peek is not None:
            self._peek(attempt, attempt.peek, data)
        else:
            framer = attempt.upstream.framer if attempt.upstream is not None else None
            if attempt.hold(data) and (framer is None or not framer.payload_bytes):
                return  # chunk framing alone
            self._commit()

    def _peek(self, attempt: Attempt, peek: StreamPeek, data: bytes) -> None:
        """A stream's first event decides: a comment tells nothing, an error may be mended elsewhere."""
        fits = attempt.hold(data)
        peek.framer.feed_into(data, peek.payload)
        verdict = first_event(bytes(peek.payload))
        if verdict is First.DATA or not fits or (verdict is First.ERROR and not self._repeatable(sent=True)):
            self._commit()
        elif verdict is First.ERROR:
            name = attempt.choice.backend.name
            self._s.passive_health.attempt_failed(attempt.choice.backend)
            self._fail_attempt("error_event", upstream_error(f"Backend {name} failed before its first token."))

    def on_response_end(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        upstream, attempt.upstream = attempt.upstream, None  # the pool's again
        usage = read_usage(upstream.framer.usage if upstream is not None and upstream.framer is not None else None)
        if self._phase is not STREAMING:
            if attempt.judging:
                self._judge()
                return
            self._commit()
        self._end_attempt(
            COMPLETE,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
        self._enter(DONE)
        self._finish(BY_UPSTREAM)

    def _commit(self) -> None:
        """The first body byte is here: the answer is this one, and begins to go downstream."""
        attempt = self._attempt
        assert attempt is not None
        answer = attempt.head
        assert answer is not None
        s = self._s
        self._enter(STREAMING)
        now = s.now()
        self._first_byte_at = self._last_byte_at = now
        choice = attempt.choice
        s.passive_health.answered(choice.backend, answer.status)
        attempt.strategy.first_byte(choice)
        s.metrics.ttft.observe(now - self._started_at)
        counts = s.metrics.by_backend[choice.backend.name]
        counts.ttft_count += 1
        counts.ttft_sum_s += now - self._started_at
        self._framer = attempt.upstream.framer if attempt.upstream is not None else None
        self._stream = answer.event_stream
        self._upstream_body = b""
        pieces, attempt.held, attempt.peek = attempt.held, None, None
        self._write_answer(answer, choice, pieces)
        self._downstream.set_deadline(s.settings.idle_s)
        s.admission.work_done(now)

    def _write_answer(self, answer: ResponseHead, choice: Choice, pieces: list[bytes] | None) -> None:
        """An engine's head and what is here of its body, in one write."""
        head = self._head
        assert head is not None
        self._served_by = choice
        self._status = answer.status
        dechunk = head.http_1_0 and answer.framing is CHUNKED
        close = not head.keep_alive or answer.framing is UNTIL_CLOSE or self._s.draining
        if close or self._tunnel:
            head.keep_alive = False
        ours = b"x-request-id: %b\r\nx-kvgate-backend: %b\r\nx-kvgate-reason: %b\r\nx-kvgate-matched: %d\r\n" % (
            self._request_id,
            choice.backend.name.encode("ascii", "replace"),
            choice.reason.encode(),
            choice.matched_tokens,
        )
        data = render_response_head(answer, ours=ours, date=self._s.date.now(), dechunk=dechunk, close=close)
        if pieces is None:
            pass
        elif dechunk:
            self._dechunker = BodyFramer(CHUNKED)
            out = bytearray(data)
            for piece in pieces:
                self._dechunker.feed_into(piece, out)
            data = bytes(out)
        else:
            data = b"".join((data, *pieces))
        self._bytes_out += len(data)
        self._downstream.write(data)

    def _forward(self, data: bytes) -> None:
        """One piece of a body under way. The whole cost of a streamed token in the gateway is here and below it."""
        attempt = self._attempt
        assert attempt is not None
        s = self._s
        now = s.now()
        s.metrics.itl.observe(now - self._last_byte_at)
        self._last_byte_at = attempt.choice.backend.last_byte_at = now
        self._downstream.deadline = now + s.settings.idle_s
        if self._dechunker is not None:
            out = bytearray()
            self._dechunker.feed_into(data, out)
            data = bytes(out)
        self._bytes_out += len(data)
        self._downstream.write(data)

    # -- back-pressure ------------------------------------------------------------------------------------------------

    def on_client_slow(self) -> None:
        self._client_slow = True
        if self._attempt is not None and self._attempt.upstream is not None:
            self._attempt.upstream.pause_reading()

    def on_client_ready(self) -> None:
        self._client_slow = False
        if self._attempt is not None and self._attempt.upstream is not None:
            self._attempt.upstream.resume_reading()

    # -- upgrades -----------------------------------------------------------------------------------------------------

    def _begin_tunnel(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._tunnel = True
        self._commit()
        early = self._downstream.start_tunnel()
        if early and attempt.upstream is not None:
            attempt.upstream.send_tunnel_data(early)

    def on_tunnel_data(self, data: bytes) -> None:
        if self._attempt is not None and self._attempt.upstream is not None:
            self._downstream.set_deadline(self._s.settings.idle_s)
            self._attempt.upstream.send_tunnel_data(data)

    def on_upstream_slow(self) -> None:
        self._downstream.pause_reading()

    def on_upstream_ready(self) -> None:
        self._downstream.resume_reading()

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def on_upstream_lost(self, why: str, any_byte: bool) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.upstream = None
        backend = attempt.choice.backend
        if self._phase is STREAMING:
            self._end_attempt(FAILED)
            self._cut(upstream_error(f"Backend {backend.name} broke off its answer: {why}."), BY_UPSTREAM)
            return
        if attempt.reused and not any_byte:
            attempt.reused = False  # the engine had closed it before the request came: nothing was lost
            self._s.metrics.retries["stale_connection"] += 1
            self._connect()
            return
        self._s.passive_health.attempt_failed(backend)
        self._fail_attempt("upstream_lost", upstream_error(f"Backend {backend.name} gave no answer: {why}."))

    def _lose_upstream(self, why: str) -> None:
        attempt = self._attempt
        assert attempt is not None
        if attempt.upstream is not None:
            attempt.upstream.discard()
        self.on_upstream_lost(why, True)

    def on_backend_silent(self, backend: Backend) -> None:
        """A backend was ejected for silence: what waits for its first byte there is repeated elsewhere if it may be."""
        attempt = self._attempt
        if (
            attempt is not None
            and attempt.choice.backend is backend
            and self._repeatable(sent=attempt.sent)
            and (not attempt.sent or self._s.budget.spend())
        ):
            self._fail_attempt("silent", upstream_timeout(f"Backend {backend.name} fell silent."), paid=True)

    def _judge(self) -> None:
        """A whole answer that says `busy` or `broken`: is another backend better, or is this the answer? Or one that
        changed the engine's models, which have to be known before it is passed on."""
        attempt = self._attempt
        assert attempt is not None
        attempt.judging = False
        if attempt.status == 200:  # an adapter came or went: whoever is told so may ask for it at once
            assert self._s.ask_models is not None
            self._downstream.deadline = None  # to ask has a time limit too
            self._cancel_check = self._s.ask_models(attempt.choice.backend, self._on_models_told)
        elif attempt.status in BUSY_STATUSES:
            self._repeat_or_pass(repeat=True)
        else:
            self._downstream.deadline = None  # a check has its own time limit
            self._cancel_check = self._s.check_engine(attempt.choice.backend, self._on_engine_checked)

    def _on_engine_checked(self, alive: bool) -> None:
        if self._cancel_check is None:
            return  # the attempt ended while the verdict was on its way
        self._cancel_check = None
        try:
            self._repeat_or_pass(repeat=not alive)
        except Exception:
            self.on_broken()

    def _on_models_told(self, told: bool) -> None:
        self._on_engine_checked(True)  # the answer is this one, whatever came of the question

    def _repeat_or_pass(self, repeat: bool) -> None:
        attempt = self._attempt
        assert attempt is not None
        assert attempt.head is not None
        if repeat and self._repeatable(sent=True):
            backend = attempt.choice.backend
            self._s.passive_health.answered(backend, attempt.head.status)
            reason = "busy" if attempt.status in BUSY_STATUSES else "broken"
            error = upstream_error(f"Backend {backend.name} answered {attempt.status}.")
            self._fail_attempt(reason, error, HeldAnswer(attempt.head, attempt.choice, attempt.held or []))
        else:
            self._commit()
            self._end_attempt(COMPLETE)
            self._enter(DONE)
            self._finish(BY_UPSTREAM)

    def _repeatable(self, *, sent: bool) -> bool:
        """Whether a further attempt is allowed and somebody else could take it."""
        if self._attempts > self._s.settings.retry_attempts:
            return False
        if not may_repeat(self._kind, sent=sent, downstream_begun=self._phase is STREAMING):
            return False
        attempt = self._attempt
        this = attempt.choice.backend if attempt is not None else None
        return any(b is not this and b not in self._tried for b in self.pool.candidates)

    def _fail_attempt(
        self, reason: str, error: RouterError, answer: HeldAnswer | None = None, *, paid: bool = False
    ) -> None:
        """No byte went downstream: repeat elsewhere, or tell the client. `paid`: the budget was asked already."""
        s = self._s
        attempt = self._attempt
        assert attempt is not None
        if self._trace is not None:
            self._trace.failure = reason
        repeat = self._repeatable(sent=attempt.sent) and (paid or not attempt.sent or s.budget.spend())
        self._failure = LastFailure(error, answer or (self._failure.answer if self._failure is not None else None))
        self._tried.append(attempt.choice.backend)
        if repeat:
            self._enter(QUEUED)
            s.metrics.retries[reason] += 1
            self.queued_at = s.now()
            self._downstream.set_deadline(s.settings.queue_timeout_s)
            s.admission.queue_repeat(self)
        self._end_attempt(COMPLETE if answer is not None else FAILED)  # its place goes to the repeat first
        if not repeat:
            self._give_up()

    def _give_up(self) -> None:
        """Nobody (else) can take it: what happened last is the answer."""
        failure = self._failure
        if failure is None:
            self._answer_error(describe_outage(self._s.registry, self.pool))
        elif failure.answer is not None:
            self._write_answer(failure.answer.head, failure.answer.choice, failure.answer.pieces)
            self._enter(DONE)
            self._finish(BY_UPSTREAM)
        else:
            self._answer_error(failure.error)

    def on_client_gone(self) -> None:
        self._s.admission.leave(self)
        self._end_attempt(CANCELLED)
        self._finish(BY_CLIENT)

    def on_shutdown(self) -> None:
        """The drain time is over."""
        self._s.admission.leave(self)
        self._end_attempt(CANCELLED)
        error = no_backend("The gateway is shutting down.")
        if self._phase is STREAMING:
            self._cut(error, BY_GATEWAY)
        else:
            self._answer_error(error)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def on_deadline(self) -> None:
        try:
            self._on_deadline()
        except Exception:
            self.on_broken()

    def _on_deadline(self) -> None:
        """The phase took too long."""
        phase = self._phase
        if phase is QUEUED:
            self._s.admission.leave(self)
            self._answer_error(self._queue_timeout())
        elif phase is CONNECTING:
            assert self._attempt is not None
            if self._attempt.connecting is not None:
                self._attempt.connecting.cancel()
            self.on_connect_failed("timed out")
        elif phase is STREAMING:
            who = BY_CLIENT if self._client_slow else BY_GATEWAY
            self._end_attempt(CANCELLED if self._client_slow else FAILED)
            self._cut(upstream_timeout("The answer stood still for too long."), who)
        elif self._attempt is not None:
            name = self._attempt.choice.backend.name
            self._s.passive_health.attempt_failed(self._attempt.choice.backend)
            self._fail_attempt("first_byte_timeout", upstream_timeout(f"Backend {name} gave no first byte in time."))

    def _queue_timeout(self) -> RouterError:
        s = self._s
        if self._request is None:
            why = "No backend has told in time that it serves what was asked for."
            return no_backend(why, retry_after_s=outage_retry_s(s.registry, s.registry.backends))
        if self.pool.candidates:
            return queue_timeout(s.settings.queue_timeout_s, s.admission.retry_after_s(self.pool, s.now()))
        return describe_outage(s.registry, self.pool)

    # -- the ends -----------------------------------------------------------------------------------------------------

    def _answer_locally(self, answer: LocalAnswer) -> None:
        extra = b"x-kvgate-error: 1\r\n" if answer.is_error else b""
        self._write_own(answer.status, answer.body, answer.content_type, extra)
        self._enter(DONE)
        self._finish(BY_GATEWAY)

    def _on_scraped(self, text: bytes | None) -> None:
        if self not in self._s.exchanges:
            return  # ended while the metrics were rendered
        try:
            if text is None:
                self._answer_error(RouterError(500, "internal_error", "The metrics could not be rendered."))
            else:
                self._answer_locally(LocalAnswer(200, METRICS_TYPE, text))
        except Exception:
            self.on_broken()

    def _answer_error(self, error: RouterError) -> None:
        """An error of ours, whole. Only before the first byte of an answer."""
        extra = b"x-kvgate-error: 1\r\n"
        if error.retry_after_s is not None:
            extra += b"retry-after: %d\r\n" % error.retry_after_s
        if error.status == 401:
            extra += b"www-authenticate: Bearer\r\n"
        if error.status == 405:
            extra += b"allow: GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH\r\n"
        self._write_own(error.status, error.body(), JSON_TYPE, extra)
        self._finish(BY_UPSTREAM if error.source is Source.UPSTREAM else BY_GATEWAY)

    def _write_own(self, status: int, body: bytes, content_type: bytes, extra: bytes) -> None:
        head = self._head
        self._status = status
        if head is not None and self._s.draining:
            head.keep_alive = False
        data = render_own_answer(
            status,
            body,
            content_type=content_type,
            date=self._s.date.now(),
            ours=b"x-request-id: %b\r\n%b" % (self._request_id, extra),
            close=head is None or not head.keep_alive,
            without_body=head is not None and head.method == b"HEAD",
        )
        self._bytes_out += len(data)
        self._downstream.write(data)

    def _cut(self, error: RouterError, ended_by: EndedBy) -> None:
        """End an answer under way that cannot be ended properly, so that nobody takes half of it for the whole."""
        framer, downstream = self._framer, self._downstream
        if self._client_slow:
            downstream.abort()
        elif self._stream and (self._dechunker is not None or framer is None or framer.until_close):
            downstream.write(b"\n\n" + error.sse_event(named=self._events_are_named()))
            downstream.close()
        elif self._stream and framer is not None and framer.at_boundary():
            event = b"\n\n" + error.sse_event(named=self._events_are_named())
            downstream.write(b"%x\r\n%b\r\n" % (len(event), event))
            downstream.close()  # no last chunk
        elif framer is None or framer.until_close or self._dechunker is not None:
            downstream.abort()  # only a reset tells that it was not the end
        else:
            downstream.close()  # fewer bytes than were promised
        self._finish(ended_by)

    def _events_are_named(self) -> bool:
        return self._head is not None and self._head.path == MESSAGES_PATH

    def on_broken(self) -> None:
        """A fault of ours, to be called in its except clause: this exchange dies, loudly, and takes nothing with it."""
        logger.exception("exchange %s broke in phase %s", self._request_id.decode("ascii", "replace"), self._phase)
        self._s.metrics.broken_exchanges += 1
        self._s.admission.leave(self)
        try:
            self._end_attempt(FAILED)
        except Exception:
            logger.exception("and its attempt could not be ended in order")
        if self._phase is STREAMING:
            self._downstream.abort()
            self._finish(BY_GATEWAY)
        elif self._phase is not DONE:
            self._answer_error(RouterError(500, "internal_error", "The gateway failed."))

    def _end_attempt(
        self,
        end: End,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """The one end of an attempt: its connection, its place, its load, its strategy. Nothing happens without one."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        s = self._s
        now = s.now()
        if self._cancel_check is not None:
            self._cancel_check()
            self._cancel_check = None
        if attempt.connecting is not None:
            attempt.connecting.cancel()
        if attempt.upstream is not None:
            attempt.upstream.discard()
            attempt.upstream = None
        attempt.guard.release()
        if attempt.trial:
            attempt.choice.backend.trial_open = False
        name = attempt.choice.backend.name
        ended = s.metrics.by_backend[name]
        ended.attempts += 1
        if end is FAILED or (attempt.status or 0) >= 500:
            ended.failed += 1
        if self._first_byte_at is not None and attempt.status == 200:  # its prompt was prefilled
            counts = s.metrics
            counts.matched_predicted[name] += attempt.choice.matched_tokens
            counts.prompt_tokens[name] += attempt.choice.prompt_tokens if prompt_tokens is None else prompt_tokens
            if cached_tokens is not None:
                counts.matched_reported[name] += cached_tokens
        now = s.now()
        if self._trace is not None:
            self._trace.end_attempt(
                end, now, self._first_byte_at, attempt.status, prompt_tokens, cached_tokens, completion_tokens
            )
        try:
            attempt.strategy.observe(
                attempt.choice,
                Outcome(end, now, attempt.status, prompt_tokens, cached_tokens, completion_tokens),
            )
        finally:
            s.admission.released(now)

    def _finish(self, ended_by: EndedBy) -> None:
        """The one end of an exchange: its counts, its line, and its connection's next request. Once."""
        s = self._s
        if self not in s.exchanges:
            return
        s.exchanges.discard(self)
        if self._question is not None:
            self._question.cancel()
            self._question = None
        head = self._head
        try:
            self._record(ended_by)
        finally:  # whatever cannot be counted, the connection's next request and the drain do not wait for it
            self._downstream.exchange_done(head is not None and head.keep_alive)
            if s.on_idle is not None and not s.exchanges:
                s.on_idle()

    def _record(self, ended_by: EndedBy) -> None:
        """Counts, the one line, the span."""
        s = self._s
        head = self._head
        phase = self._phase
        if phase is not DONE:
            self._enter(DONE)
        total_s = s.now() - self._started_at
        code = self._status or 499
        answered_by = self._served_by.backend.name if self._served_by is not None else ""
        s.metrics.count_request(self.pool.model, answered_by, code)
        s.metrics.codes[code] += 1
        s.metrics.ended[ended_by, phase] += 1
        if self._first_byte_at is not None:
            s.metrics.e2e.observe(total_s)
        choice = self._served_by or self._choice
        if s.access_log is not None or self._trace is not None:
            line = AccessLine(
                self._downstream.peer,
                head.method if head is not None else b"-",
                head.path if head is not None else b"-",
                code,
                ended_by + "@" + phase,
                self.pool.model,
                choice.backend.name if choice is not None else "",
                choice.reason if choice is not None else "",
                choice.matched_tokens if choice is not None else None,
                self._load,
                self._attempts,
                self._queued_s,
                self._first_byte_at - self._started_at if self._first_byte_at is not None else None,
                total_s,
                self._bytes_out,
                self._request_id,
                self._caller.name if self._caller is not None else "",
            )
            if s.access_log is not None:
                s.access_log.write(line)
            if self._trace is not None and s.tracer is not None:
                s.tracer.finish(self._trace, line, s.now())

    def _enter(self, phase: Phase) -> None:
        """The only writer of the phase."""
        if phase not in MOVES[self._phase]:
            raise AssertionError(f"no move from {self._phase} to {phase}")
        self._phase = phase
