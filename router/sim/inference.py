"""Inference calls between the engine and their clients: accepted, submitted, streamed, ended exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from router.clock import Clock, TimerHandle
from router.sim import calls, replies
from router.sim.adapters import Adapters
from router.sim.answers import Answer
from router.sim.calls import ApiError, Call, CallLimits, Choice
from router.sim.engine import SimEngine
from router.sim.engine_model import Finish, Output
from router.sim.faults import CUTS, FaultKind, Faults
from router.sim.http_protocol import Exchange
from router.sim.observations import Observations
from router.sim.replies import EmbeddingReply, Reply, ReplyContext, reply_for
from router.sim.sim_config import SimConfig


class Serving:
    """One inference call between the engine and its client."""

    __slots__ = (
        "call",
        "comment_timer",
        "exchange",
        "fail_first",
        "on_end",
        "opened",
        "record",
        "reply",
        "touched",
    )

    def __init__(self, call: Call, reply: Reply, exchange: Exchange, record: dict[str, Any]) -> None:
        self.call = call
        self.reply = reply
        self.exchange = exchange
        self.record = record
        self.opened = False
        self.touched: dict[Choice, None] = {}  # choices with something to send, in order
        self.fail_first = False
        self.on_end: Callable[[], None] | None = None
        self.comment_timer: TimerHandle | None = None


class Inference:
    """`engine` is set by whoever builds both: each needs the other."""

    def __init__(
        self,
        config: SimConfig,
        clock: Clock,
        wall_time: Callable[[], float],
        faults: Faults,
        adapters: Adapters,
        observations: Observations,
        identities: Random,
    ) -> None:
        self.adapters = adapters
        self.open_calls = 0
        self.limits = CallLimits(
            max_model_len=config.max_model_len,
            default_output_tokens=config.default_output_tokens,
            block_size=config.engine.block_size,
            auto_tool_choice=config.auto_tool_choice,
            seed=config.seed,
        )
        self._config = config
        self._clock = clock
        self._wall_time = wall_time
        self._faults = faults
        self._observations = observations
        self._identities = identities
        self._serving: dict[str, Serving] = {}  # by engine request id; several ids may share one
        self._next_request = 0
        self._engine: SimEngine

    def attach(self, engine: SimEngine) -> None:
        self._engine = engine

    # -- from the engine

    def deliver(self, outputs: Sequence[Output]) -> None:
        """What a step brought, to the clients that it is for."""
        served: dict[int, Serving] = {}
        for request, count, finish in outputs:
            choice: Choice = request.payload
            choice.generated += count
            choice.finish = finish
            self._observations.counts.generated_tokens += count
            serving = self._serving.get(request.request_id)
            if serving is None:
                continue
            if finish is not None:
                del self._serving[request.request_id]
            serving.touched[choice] = None
            served[id(serving)] = serving
        for serving in served.values():
            self._flush(serving)
        self._observations.changed()

    def abort_all(self) -> None:
        """Every request in flight ends properly, with finish_reason abort."""
        for request in self._engine.model.requests():
            self._engine.model.abort(request.request_id)
            choice: Choice = request.payload
            serving = self._serving.pop(request.request_id, None)
            if serving is not None:
                choice.finish = Finish.ABORT
                serving.touched[choice] = None
                self._engine.metrics.success["abort"] += 1
                self._flush(serving)

    def lose_all(self) -> None:
        """The process is gone: no request gets another byte. Their connections are the caller's to cut."""
        for request in self._engine.model.requests():
            self._engine.model.abort(request.request_id)
            serving = self._serving.pop(request.request_id, None)
            if serving is not None:
                serving.exchange.stall()

    # -- from clients

    def infer(
        self,
        exchange: Exchange,
        check: Callable[[dict[str, Any]], None] | None,
        read: Callable[[dict[str, Any], str, str | None, CallLimits], Call],
    ) -> None:
        record = self._observations.note_request(exchange)
        try:
            if self._fault_before(exchange, record):
                return
            body = calls.read_body(exchange.content_type, exchange.body)
            if check is not None:
                check(body)
            model, adapter = self.adapters.model_of(body)
            call = read(body, model, adapter, self.limits)
            self._check_queue(len(call.choices))
        except ApiError as error:
            self._refuse(exchange, record, error)
            return
        identity = exchange.headers.get("x-request-id") or f"{self._identities.getrandbits(64):016x}"
        context = ReplyContext(
            identity,
            int(self._wall_time()),
            self._engine.fingerprint,
            self._config.engine.block_size,
            details=self._config.prompt_tokens_details,
            cached_tokens=self._faults.take(FaultKind.CACHED_TOKENS),
        )
        serving = Serving(call, reply_for(call, context), exchange, record)
        self._submit(serving)

    def embed(self, exchange: Exchange) -> None:
        """One prefill per input; the vectors come from the text's hash."""
        record = self._observations.note_request(exchange)
        try:
            if self._fault_before(exchange, record):
                return
            body = calls.read_body(exchange.content_type, exchange.body)
            model, adapter = self.adapters.model_of(body)
            prompts = [tokens for tokens, _ in calls.read_prompts(body, self.limits, "input")]
            self._check_queue(len(prompts))
        except ApiError as error:
            self._refuse(exchange, record, error)
            return
        answer = Answer([""], prompts[0][:1], Finish.STOP)
        choices = [Choice(index, tokens, answer, self.limits, None, adapter) for index, tokens in enumerate(prompts)]
        call = Call(
            api=calls.Api.COMPLETION,
            body=body,
            model=model,
            n=1,
            max_tokens=1,
            choices=choices,
            stream=False,
            prompts=prompts,
        )
        identity = exchange.headers.get("x-request-id") or f"{self._identities.getrandbits(64):016x}"
        reply = EmbeddingReply(call, identity, int(self._wall_time()))
        self._submit(Serving(call, reply, exchange, record))

    def transcribe(self, exchange: Exchange, audio: bytes, model: str, on_end: Callable[[], None]) -> bool:
        """Answer with messages on the websocket of `exchange`, which outlives this call; `on_end` when it is over and
        the client still there. False: a fault took the connection. ApiError for audio that is too long."""
        record = self._observations.note_request(exchange)
        try:
            if self._fault_before(exchange, record):
                return False
            call = calls.read_audio(audio, model, self.limits)
            self._check_queue(1)
        except ApiError:
            self._observations.counts.rejected += 1
            record["state"] = "rejected"
            self._observations.changed()
            raise
        context = ReplyContext("", 0, self._engine.fingerprint, self._config.engine.block_size, details=False)
        serving = Serving(call, reply_for(call, context), exchange, record)
        serving.on_end = on_end
        self._submit(serving)
        return True

    def _refuse(self, exchange: Exchange, record: dict[str, Any], error: ApiError) -> None:
        self._observations.counts.rejected += 1
        record["state"] = "rejected"
        self._respond(exchange, error.status, error.body(exchange.path))
        self._observations.changed()

    def _submit(self, serving: Serving) -> None:
        call, exchange = serving.call, serving.exchange
        now = self._clock.now()
        self._observations.counts.accepted += 1
        self.open_calls += 1
        serving.record["state"] = "running"
        for choice in call.choices:
            request = choice.request
            self._next_request += 1
            request.request_id = f"request-{self._next_request}"
            request.arrived_at = now
            self._engine.model.submit(request)
            self._serving[request.request_id] = serving
        exchange.on_gone = lambda: self._client_gone(serving)
        exchange.on_writable = lambda: self._flush(serving)
        if call.stream and not exchange.tunnel:
            self._start_stream(serving)
        elif self._faults.take(FaultKind.STALL_AFTER_HEAD):
            exchange.start_body(1000)
            exchange.stall()
        self._engine.wake()
        self._observations.changed()

    def _start_stream(self, serving: Serving) -> None:
        exchange = serving.exchange
        exchange.start_stream()
        comments = self._faults.take(FaultKind.KEEPALIVE_COMMENTS)
        if comments:
            exchange.write_events([b": keep-alive\n\n"] * comments)
        if self._faults.take(FaultKind.STALL_AFTER_HEAD):
            exchange.stall()
        serving.fail_first = self._faults.take(FaultKind.FIRST_EVENT_ERROR) is not None
        interval = self._config.sse_keep_alive_s
        if interval is not None:
            serving.comment_timer = self._clock.call_later(interval, self._comment, serving, interval)

    def _comment(self, serving: Serving, interval: float) -> None:
        serving.comment_timer = None
        if serving.exchange.done:
            return
        if serving.exchange.writable:
            serving.exchange.write_events([b": keep-alive\n\n"])
        serving.comment_timer = self._clock.call_later(interval, self._comment, serving, interval)

    def _check_queue(self, count: int) -> None:
        limit = self._config.max_num_queued_reqs
        if limit is None:
            return
        # Those that the next step will seat are not in the queue that the flag means.
        free_seats = self._config.engine.max_num_seqs - len(self._engine.model.running)
        if max(0, len(self._engine.model.waiting) - free_seats + count) > limit:
            self._engine.metrics.queue_rejections += 1
            raise calls.BUSY

    def _fault_before(self, exchange: Exchange, record: dict[str, Any]) -> bool:
        """Faults that strike before the request is read. True: nothing is left to do."""
        faults = self._faults
        exchange.drip_s = faults.take(FaultKind.DRIP)
        exchange.trailing_bytes = faults.take(FaultKind.TRAILING_BYTES) or 0
        for kind in CUTS:
            left = faults.take(kind)
            if left is not None:
                exchange.cut = (kind, left)
                break
        if faults.take(FaultKind.ENGINE_DEAD):
            raise calls.ENGINE_DEAD
        status = faults.take(FaultKind.STATUS)
        if status is not None:
            kinds = {400: "BadRequestError", 429: "Too Many Requests", 500: "InternalServerError"}
            if status == 503:
                raise calls.BUSY
            raise ApiError(status, kinds[status], "Switched on as a fault.")
        if faults.take(FaultKind.RESET):
            self._observations.counts.rejected += 1
            record["state"] = "reset"
            exchange.reset()
            self._observations.changed()
            return True
        if faults.take(FaultKind.STALL):
            self._observations.counts.stalled += 1
            record["state"] = "stalled"
            exchange.on_gone = lambda: self._stalled_client_gone(record)
            exchange.stall()
            self._observations.changed()
            return True
        return False

    def _stalled_client_gone(self, record: dict[str, Any]) -> None:
        self._observations.counts.stalled -= 1
        self._observations.counts.aborted += 1
        record["state"] = "aborted"
        self._observations.changed()

    def _client_gone(self, serving: Serving) -> None:
        for choice in serving.call.choices:
            self._serving.pop(choice.request.request_id, None)
            self._engine.model.abort(choice.request.request_id)
        self._observations.counts.aborted += 1
        self._ended(serving, "aborted")

    def _flush(self, serving: Serving) -> None:
        """Send what the client does not have, if it reads; finish what is finished."""
        exchange, call = serving.exchange, serving.call
        if exchange.done:
            return
        if not call.stream:
            if call.finished and not exchange.stuck:
                self._finish(serving)
            elif call.finished:
                self._end_stuck(serving)
            return
        if not exchange.writable:
            return
        if serving.fail_first:
            done = [] if call.api is calls.Api.MESSAGES else [replies.DONE]
            exchange.write_events([calls.ENGINE_DEAD.event(exchange.path), *done], last=True)
            for choice in call.choices:
                self._serving.pop(choice.request.request_id, None)
                self._engine.model.abort(choice.request.request_id)
            self._observations.counts.rejected += 1
            self._ended(serving, "failed")
            return
        events: list[bytes] = []
        touched, serving.touched = serving.touched, {}
        if touched and not serving.opened:
            serving.opened = True
            events += serving.reply.opening()
        for choice in touched:
            events += serving.reply.delta(choice)
        last = call.finished
        if last:
            if not serving.opened:
                serving.opened = True
                events += serving.reply.opening()
            events += serving.reply.closing()
        whole = exchange.write_events(events, last=last) if events else False
        if last:
            if whole:
                self._observations.counts.finished += 1
                self._ended(serving, "finished")
            else:
                self._end_stuck(serving)

    def _finish(self, serving: Serving) -> None:
        exchange = serving.exchange
        load: list[tuple[str, str]] = []
        wanted = exchange.headers.get("endpoint-load-metrics-format", "").upper()
        if wanted in ("JSON", "TEXT"):
            load.append(("endpoint-load-metrics", self._orca(wanted)))
        body = serving.reply.body()
        # Counted before it is sent: who has the answer may ask for the counts at once.
        if exchange.cut is None:
            self._observations.counts.finished += 1
            self._ended(serving, "finished")
        else:
            self._end_stuck(serving)
        self._respond(exchange, 200, body, headers=load)

    def _end_stuck(self, serving: Serving) -> None:
        """The engine is done, a fault keeps the client from knowing."""
        self._ended(serving, "cut")

    def _ended(self, serving: Serving, state: str) -> None:
        call, record = serving.call, serving.record
        # What comes of the connection is no longer ours; and no cycle is left to the garbage collector.
        serving.exchange.on_gone = serving.exchange.on_writable = None
        if serving.comment_timer is not None:
            serving.comment_timer.cancel()
            serving.comment_timer = None
        self.open_calls -= 1
        self._observations.counts.prompt_tokens += call.prompt_tokens
        self._observations.counts.cached_tokens += call.cached_tokens
        record["state"] = state
        record["prompt_tokens"] = call.prompt_tokens
        record["cached_tokens"] = call.cached_tokens
        record["generated_tokens"] = call.completion_tokens
        if state == "finished":
            self._engine.metrics.call(call.n, call.max_tokens)
            if call.stream and not serving.exchange.tunnel:
                self._engine.metrics.http(serving.exchange.path, serving.exchange.method, 200)
        self._observations.changed()
        on_end, serving.on_end = serving.on_end, None
        if on_end is not None and state == "finished":
            on_end()

    def _orca(self, wanted: str) -> str:
        waiting, usage = float(len(self._engine.model.waiting)), self._engine.model.pool.usage
        if wanted == "JSON":
            return f'JSON {{"named_metrics": {{"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}}}}}'
        return f"TEXT named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"

    def _respond(self, exchange: Exchange, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._engine.metrics.http(exchange.path, exchange.method, status)
        exchange.respond(status, body, headers=headers)
