"""The simulated engine as a process sees it: routes, the engine's steps in real time, faults and exact counts.

The engine runs on the loop's clock: a step opens, its duration passes, its tokens go out, the next one opens. Steps
follow the ideal times (a late wake-up shortens the next wait), and with nothing to do nothing runs.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import parse_qs

import orjson
import xxhash

from router.clock import Clock, SystemClock, TimerHandle
from router.sim import calls, replies
from router.sim.answers import Answer
from router.sim.calls import ApiError, Call, CallLimits, Choice
from router.sim.engine_metrics import EngineMetrics, Names
from router.sim.engine_model import EngineConfig, EngineModel, Finish
from router.sim.faults import CUTS, FaultKind, Faults
from router.sim.http_protocol import DateHeader, Exchange, HttpProtocol
from router.sim.kv_publisher import KVEventsConfig, KVPublisher
from router.sim.replies import EmbeddingReply, Reply, ReplyContext, reply_for
from router.sim.tokenizer import VOCABULARY, TokenTexts

VERSION = "0.32.0"
MAX_LAG_S = 0.1  # steps later than this do not try to catch up
MAX_RECORDS = 10_000  # request ids that /sim/stats remembers
MAX_TRIES_PER_ID = 16
MAX_WAITERS = 64
MAX_ADAPTERS = 64
MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Everything about one simulated engine. Lengths in tokens, times in seconds."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    served_model_names: tuple[str, ...] = ("sim-8b",)
    model_root: str = "sim-8b"
    max_model_len: int = 131_072
    default_output_tokens: int = 128
    prompt_tokens_details: bool = False
    auto_tool_choice: bool = False
    request_id_headers: bool = False
    load_tracking: bool = False
    scale_out: bool = False
    dev_mode: bool = False
    lora: bool = False
    pooling: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_num_queued_reqs: int | None = None
    sse_keep_alive_s: float | None = None
    kv_events: KVEventsConfig | None = field(default_factory=KVEventsConfig)
    metrics_names: Names = Names.NEW
    max_body_bytes: int = 268_435_456
    control_port: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Counts:
    """What /sim/stats says. Calls unless named otherwise."""

    requests: int = 0  # inference calls that came in, whatever became of them
    accepted: int = 0  # given to the engine
    finished: int = 0  # answered to the end
    aborted: int = 0  # the client left first
    rejected: int = 0  # answered with an error
    stalled: int = 0  # a fault keeps them without an answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Serving:
    """One inference call between the engine and its client."""

    __slots__ = (
        "call",
        "comment_timer",
        "comments",
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
        self.touched: list[Choice] = []  # choices with something to send
        self.comments = 0
        self.fail_first = False
        self.comment_timer: TimerHandle | None = None
        self.on_end: Callable[[Serving], None] | None = None


Handler = Callable[["SimServer", Exchange], None]


class SimServer:
    """`clock` drives steps and time-outs, `wall_time` (Unix seconds) dates what clients see."""

    def __init__(self, config: SimConfig, loop: asyncio.AbstractEventLoop, wall_time: Callable[[], float]) -> None:
        self.config = config
        self.clock: Clock = SystemClock(loop)
        self.connections: set[HttpProtocol] = set()
        self.max_body_bytes = config.max_body_bytes
        self.draining = False
        self.faults = Faults()
        self.counts = Counts()
        self.wall_time = wall_time
        self._loop = loop
        self._random = Random(config.seed)
        self._identities = Random(f"{config.seed}/{wall_time()}")
        self._limits = CallLimits(
            max_model_len=config.max_model_len,
            default_output_tokens=config.default_output_tokens,
            block_size=config.engine.block_size,
            auto_tool_choice=config.auto_tool_choice,
            seed=config.seed,
        )
        self._date = DateHeader(wall_time)
        self._routes = route_table(config)
        self._applying: asyncio.Task[None] | None = None  # the loop holds its tasks weakly
        self._texts = TokenTexts()
        self._adapters: dict[str, str] = {}
        self._serving: dict[str, Serving] = {}  # by engine request id; several ids may share one
        self._records: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self._waiters: list[tuple[dict[str, int], Exchange]] = []
        self._next_request = 0
        self._server: asyncio.Server | None = None
        self._control: asyncio.Server | None = None
        self._port = config.port
        self._step_timer: TimerHandle | None = None
        self._step_ends_at = 0.0
        self._step_wanted = False
        self._sleep_level = 0
        self._server_load = 0
        self.publisher: KVPublisher | None = None
        if config.kv_events is not None:
            self.publisher = KVPublisher(
                config.kv_events, config.engine.block_size, loop, wall_time, lambda request: request.payload
            )
        self._begin_life()

    def _begin_life(self) -> None:
        """What a start of the process sets to nothing."""
        config = self.config
        self.model = EngineModel(config.engine, emit_events=self.publisher is not None)
        self._created = self.wall_time()
        self._fingerprint = f"vllm-{VERSION}-{xxhash.xxh3_64_hexdigest(repr(config.engine).encode())[:8]}"
        name = config.served_model_names[0]
        self.metrics = EngineMetrics(self.model, name, config.max_model_len, self._created, config.metrics_names)

    # -- life of the process

    async def start(self) -> int:
        """Listen; the port."""
        await self._listen()
        if self.config.control_port is not None:
            make = lambda: HttpProtocol(self, self._date)  # noqa: E731
            self._control = await self._loop.create_server(make, self.config.host, self.config.control_port)
        return self._port

    @property
    def control_port(self) -> int | None:
        if self._control is None:
            return None
        return int(self._control.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """As vLLM on SIGTERM: what is in flight ends as aborted, properly, and the listener is closed."""
        self.draining = True
        for server in (self._server, self._control):
            if server is not None:
                server.close()
        self._server = self._control = None
        self.abort_all()
        for _, exchange in self._waiters:
            exchange.respond(503, b'{"error":"stopping"}')
        self._waiters.clear()
        for connection in list(self.connections):
            connection.drain()
        # Closed transports are lost in the next iterations; a client that does not read is not waited for long.
        for _ in range(50):
            if not self.connections:
                break
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.reset()
        await asyncio.sleep(0)
        if self._step_timer is not None:
            self._step_timer.cancel()
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def abort_all(self) -> None:
        """Every request in flight gets finish_reason abort."""
        for request in self.model.requests():
            self.model.abort(request.request_id)
            choice: Choice = request.payload
            serving = self._serving.pop(request.request_id, None)
            if serving is not None:
                choice.finish = Finish.ABORT
                serving.touched.append(choice)
                self.metrics.success["abort"] += 1
                self._flush(serving)

    async def _listen(self) -> None:
        make = lambda: HttpProtocol(self, self._date)  # noqa: E731
        self._server = await self._loop.create_server(make, self.config.host, self._port, backlog=2048)
        self._port = int(self._server.sockets[0].getsockname()[1])

    # -- the engine in real time

    def _wake(self) -> None:
        """There is work: open a step in this iteration's end, so that requests read together batch together."""
        if self._step_timer is None and not self._step_wanted and not self._sleep_level:
            self._step_wanted = True
            self._step_ends_at = self.clock.now()
            self._loop.call_soon(self._open_step)

    def _open_step(self) -> None:
        self._step_wanted = False
        if self._step_timer is not None or self._sleep_level:
            return
        now = self.clock.now()
        begin = self._step_ends_at if now - self._step_ends_at < MAX_LAG_S else now
        before = self.model.stats.step_tokens
        duration = self.model.schedule(begin)
        if duration is None:
            return
        self.metrics.step(self.model.stats.step_tokens - before)
        self._step_ends_at = begin + duration
        self._step_timer = self.clock.call_later(max(0.0, self._step_ends_at - now), self._close_step)

    def _close_step(self) -> None:
        self._step_timer = None
        model, metrics = self.model, self.metrics
        end = self._step_ends_at
        served: dict[int, Serving] = {}
        for request, count, finish in model.complete(end):
            if request.first_token_at == end:
                metrics.first_token(end - request.arrived_at)
            if finish is not None:
                metrics.finished(request, finish)
            choice: Choice = request.payload
            choice.generated += count
            choice.finish = finish
            self.counts.generated_tokens += count
            serving = self._serving.get(request.request_id)
            if serving is None:
                continue
            if finish is not None:
                del self._serving[request.request_id]
            serving.touched.append(choice)
            served[id(serving)] = serving
        for serving in served.values():
            self._flush(serving)
        self._publish()
        self._open_step()
        self._changed()

    def _publish(self) -> None:
        if self.publisher is not None:
            self.publisher.publish(self.model.take_events())

    # -- requests in

    def handle(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        if path.startswith("/sim/"):
            self._handle_sim(exchange)
            return
        if self.config.request_id_headers:
            given = exchange.headers.get("x-request-id")
            exchange.response_id = given or f"{self._identities.getrandbits(128):032x}"
        if self.config.api_keys and path.startswith("/v1") and not self._authorized(exchange):
            exchange.vary = False
            exchange.respond(401, b'{"error":"Unauthorized"}')
            return
        methods = self._routes.get(path)
        if methods is None:
            self._respond(exchange, 404, b'{"detail":"Not Found"}', handler="none")
            return
        handler = methods.get(method)
        if handler is None:
            allow = [("allow", ", ".join(sorted(methods)))]
            self._respond(exchange, 405, b'{"detail":"Method Not Allowed"}', headers=allow, handler="none")
            return
        try:
            handler(self, exchange)
        except ApiError as error:
            self._respond(exchange, error.status, error.body())

    def _authorized(self, exchange: Exchange) -> bool:
        scheme, _, token = exchange.headers.get("authorization", "").partition(" ")
        given = token.encode("latin-1", "replace")
        matches = [hmac.compare_digest(given, key.encode()) for key in self.config.api_keys]
        return scheme.lower() == "bearer" and any(matches)

    def _respond(
        self,
        exchange: Exchange,
        status: int,
        body: bytes = b"",
        *,
        headers: list[tuple[str, str]] | None = None,
        handler: str | None = None,
    ) -> None:
        self.metrics.http(handler or exchange.path, exchange.method, status)
        exchange.respond(status, body, headers=headers or ())

    def _json(self, exchange: Exchange) -> dict[str, Any]:
        media = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise calls.UNSUPPORTED_TYPE
        return calls.read_json(exchange.body)

    def _model_of(self, body: dict[str, Any]) -> tuple[str, str | None]:
        """(the model's name for the answer, the adapter). ApiError 404 for one that is not served."""
        names = self.config.served_model_names
        model = body.get("model")
        if model is None or model in ("", names[0]):
            return names[0], None
        if not isinstance(model, str):
            raise calls.invalid("string_type", "body.model", "Input should be a valid string", model)
        if model in names:
            return names[0], None
        if model in self._adapters:
            return model, model
        text = f"The model `{model[:200]}` does not exist. Valid aliases: {', '.join(names)}."
        raise ApiError(404, "NotFoundError", text, "model")

    # -- inference

    def _infer(
        self,
        exchange: Exchange,
        check: Callable[[dict[str, Any]], None] | None,
        read: Callable[[dict[str, Any], str, str | None, CallLimits], Call],
    ) -> None:
        record = self._note_request(exchange)
        try:
            if self._fault_before(exchange, record):
                return
            body = self._json(exchange)
            if check is not None:
                check(body)
            model, adapter = self._model_of(body)
            call = read(body, model, adapter, self._limits)
            self._check_queue(len(call.choices))
        except ApiError as error:
            self.counts.rejected += 1
            record["state"] = "rejected"
            self._respond(exchange, error.status, error.body())
            self._changed()
            return
        identity = exchange.headers.get("x-request-id") or f"{self._identities.getrandbits(64):016x}"
        context = ReplyContext(
            identity,
            int(self.wall_time()),
            self._fingerprint,
            self.config.engine.block_size,
            details=self.config.prompt_tokens_details,
            cached_tokens=self.faults.take(FaultKind.CACHED_TOKENS),
        )
        serving = Serving(call, reply_for(call, context), exchange, record)
        self._submit(serving)

    def _submit(self, serving: Serving) -> None:
        call, exchange = serving.call, serving.exchange
        now = self.clock.now()
        self.counts.accepted += 1
        self._server_load += 1
        serving.record["state"] = "running"
        for choice in call.choices:
            request = choice.request
            self._next_request += 1
            request.request_id = f"request-{self._next_request}"
            request.arrived_at = now
            self.model.submit(request)
            self._serving[request.request_id] = serving
        exchange.on_gone = lambda: self._client_gone(serving)
        exchange.on_writable = lambda: self._flush(serving)
        if call.stream:
            self._start_stream(serving)
        elif self.faults.take(FaultKind.STALL_AFTER_HEAD):
            exchange.start_body(1000)
            exchange.stall()
        self._wake()
        self._changed()

    def _start_stream(self, serving: Serving) -> None:
        exchange = serving.exchange
        exchange.start_stream()
        comments = self.faults.take(FaultKind.KEEPALIVE_COMMENTS)
        if comments:
            exchange.write_events([b": keep-alive\n\n"] * comments)
        if self.faults.take(FaultKind.STALL_AFTER_HEAD):
            exchange.stall()
        serving.fail_first = self.faults.take(FaultKind.FIRST_EVENT_ERROR) is not None
        interval = self.config.sse_keep_alive_s
        if interval is not None:
            serving.comment_timer = self.clock.call_later(interval, self._comment, serving, interval)

    def _comment(self, serving: Serving, interval: float) -> None:
        serving.comment_timer = None
        if serving.exchange.done:
            return
        if serving.exchange.writable:
            serving.exchange.write_events([b": keep-alive\n\n"])
        serving.comment_timer = self.clock.call_later(interval, self._comment, serving, interval)

    def _check_queue(self, count: int) -> None:
        limit = self.config.max_num_queued_reqs
        if limit is None:
            return
        # Those that the next step will seat are not in the queue that the flag means.
        free_seats = self.config.engine.max_num_seqs - len(self.model.running)
        if max(0, len(self.model.waiting) - free_seats + count) > limit:
            self.metrics.queue_rejections += 1
            raise calls.BUSY

    def _fault_before(self, exchange: Exchange, record: dict[str, Any]) -> bool:
        """Faults that strike before the request is read. True: nothing is left to do."""
        faults = self.faults
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
            self.counts.rejected += 1
            record["state"] = "reset"
            exchange.reset()
            self._changed()
            return True
        if faults.take(FaultKind.STALL):
            self.counts.stalled += 1
            record["state"] = "stalled"
            exchange.on_gone = lambda: self._stalled_client_gone(record)
            exchange.stall()
            self._changed()
            return True
        return False

    def _stalled_client_gone(self, record: dict[str, Any]) -> None:
        self.counts.stalled -= 1
        self.counts.aborted += 1
        record["state"] = "aborted"
        self._changed()

    def _client_gone(self, serving: Serving) -> None:
        for choice in serving.call.choices:
            self._serving.pop(choice.request.request_id, None)
            self.model.abort(choice.request.request_id)
        self.counts.aborted += 1
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
            exchange.write_events([calls.ENGINE_DEAD.event(), replies.DONE], last=True)
            for choice in call.choices:
                self._serving.pop(choice.request.request_id, None)
                self.model.abort(choice.request.request_id)
            self.counts.rejected += 1
            self._ended(serving, "failed")
            return
        events: list[bytes] = []
        touched, serving.touched = serving.touched, []
        if touched and not serving.opened:
            serving.opened = True
            events += serving.reply.opening()
        for choice in dict.fromkeys(touched):
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
                self.counts.finished += 1
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
            self.counts.finished += 1
            self._ended(serving, "finished")
        else:
            self._end_stuck(serving)
        self._respond(exchange, 200, body, headers=load)

    def _end_stuck(self, serving: Serving) -> None:
        """The engine is done, a fault keeps the client from knowing."""
        exchange = serving.exchange
        exchange.on_gone = None
        exchange.on_writable = None
        self._ended(serving, "cut")

    def _ended(self, serving: Serving, state: str) -> None:
        call, record = serving.call, serving.record
        if serving.comment_timer is not None:
            serving.comment_timer.cancel()
            serving.comment_timer = None
        self._server_load -= 1
        self.counts.prompt_tokens += call.prompt_tokens
        self.counts.cached_tokens += call.cached_tokens
        record["state"] = state
        record["prompt_tokens"] = call.prompt_tokens
        record["cached_tokens"] = call.cached_tokens
        record["generated_tokens"] = call.completion_tokens
        if state == "finished":
            self.metrics.call(call.n, call.max_tokens)
            if call.stream:
                self.metrics.http(serving.exchange.path, serving.exchange.method, 200)
        self._changed()

    def _orca(self, wanted: str) -> str:
        waiting, usage = float(len(self.model.waiting)), self.model.pool.usage
        if wanted == "JSON":
            return f'JSON {{"named_metrics": {{"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}}}}}'
        return f"TEXT named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"

    # -- routes

    def _chat(self, exchange: Exchange) -> None:
        self._infer(exchange, calls.check_chat, calls.read_chat)

    def _completions(self, exchange: Exchange) -> None:
        self._infer(exchange, calls.check_completion, calls.read_completion)

    def _responses(self, exchange: Exchange) -> None:
        self._infer(exchange, None, calls.read_responses)

    def _messages(self, exchange: Exchange) -> None:
        self._infer(exchange, None, calls.read_messages)

    def _invocations(self, exchange: Exchange) -> None:
        """SageMaker's one path: the body tells what is meant."""
        body = self._json(exchange)
        if self.config.pooling:
            self._embeddings(exchange)
        elif "messages" in body:
            self._chat(exchange)
        elif "prompt" in body:
            self._completions(exchange)
        else:
            raise calls.refused("Cannot find suitable handler for request. Expected one of: messages, prompt.")

    def _embeddings(self, exchange: Exchange) -> None:
        """One prefill per input; the vectors come from the text's hash."""
        record = self._note_request(exchange)
        try:
            if self._fault_before(exchange, record):
                return
            body = self._json(exchange)
            model, adapter = self._model_of(body)
            prompts = [tokens for tokens, _ in calls.read_prompts(body, self._limits, "input")]
            self._check_queue(len(prompts))
        except ApiError as error:
            self.counts.rejected += 1
            record["state"] = "rejected"
            self._respond(exchange, error.status, error.body())
            self._changed()
            return
        answer = Answer([""], prompts[0][:1], Finish.STOP)
        choices = [Choice(index, tokens, answer, self._limits, None, adapter) for index, tokens in enumerate(prompts)]
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
        reply = EmbeddingReply(call, identity, int(self.wall_time()))
        self._submit(Serving(call, reply, exchange, record))

    def _models(self, exchange: Exchange) -> None:
        fault = self.faults.take(FaultKind.BAD_MODELS)
        if fault == "hang":
            exchange.stall()
            return
        if fault == "error":
            raise calls.ENGINE_DEAD
        if fault == "garbage":
            self._respond(exchange, 200, b'{"object":"list","data":[{"id":')
            return
        created = int(self.wall_time())
        data: list[dict[str, Any]] = []
        if fault != "empty":
            names = self.config.served_model_names
            data = [self._model_card(name, created, self.config.model_root, None) for name in names]
            data += [self._model_card(name, created, path, names[0]) for name, path in self._adapters.items()]
        self._respond(exchange, 200, orjson.dumps({"object": "list", "data": data}))

    def _model_card(self, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self.config.max_model_len if parent is None else None,
            "permission": [
                {
                    "id": f"modelperm-{self._identities.getrandbits(64):016x}",
                    "object": "model_permission",
                    "created": created,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }

    def _health(self, exchange: Exchange) -> None:
        dead = self.faults.peek(FaultKind.UNHEALTHY) or self.faults.peek(FaultKind.ENGINE_DEAD)
        # Not counted in http_requests_total, nor is /metrics: vLLM excludes both.
        exchange.respond(503 if dead else 200, b"", None)

    def _version(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, orjson.dumps({"version": VERSION}))

    def _load(self, exchange: Exchange) -> None:
        load = self._server_load if self.config.load_tracking else 0
        exchange.respond(200, orjson.dumps({"server_load": load}))

    def _metrics(self, exchange: Exchange) -> None:
        delay_s = self.faults.take(FaultKind.SLOW_METRICS)
        if delay_s is None:
            self._send_metrics(exchange)
        else:
            self.clock.call_later(delay_s, self._send_metrics, exchange)

    def _send_metrics(self, exchange: Exchange) -> None:
        if not exchange.done:
            self.metrics.sleep_level = self._sleep_level
            exchange.respond(200, self.metrics.render(), "text/plain; version=0.0.4; charset=utf-8")

    def _kv_event_sources(self, exchange: Exchange) -> None:
        sources = self.publisher.sources() if self.publisher is not None else {}
        self._respond(exchange, 200, orjson.dumps(sources))

    def _tokenize(self, exchange: Exchange) -> None:
        body = self._json(exchange)
        self._model_of(body)
        tokens, texts, text = calls.read_tokenize(body)
        if text:
            self._texts.learn(text[: 4 * 65_536])
        reply = {
            "count": len(tokens),
            "max_model_len": self.config.max_model_len,
            "tokens": tokens.tolist(),
            "token_strs": texts,
        }
        self._respond(exchange, 200, orjson.dumps(reply))

    def _detokenize(self, exchange: Exchange) -> None:
        body = self._json(exchange)
        self._model_of(body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise calls.invalid("list_type", "body.tokens", "Input should be a valid list", type(tokens).__name__)
        for token in tokens:
            if not 0 <= token < VOCABULARY:
                raise calls.refused(f"Token id {token} is out of vocabulary")
        self._respond(exchange, 200, orjson.dumps({"prompt": self._texts.detokenize(tokens)}))

    def _render_chat(self, exchange: Exchange) -> None:
        self._render(exchange, calls.check_chat, calls.read_chat, "chatcmpl")

    def _render_completion(self, exchange: Exchange) -> None:
        self._render(exchange, calls.check_completion, calls.read_completion, "cmpl")

    def _render(
        self,
        exchange: Exchange,
        check: Callable[[dict[str, Any]], None],
        read: Callable[[dict[str, Any], str, str | None, CallLimits], Call],
        prefix: str,
    ) -> None:
        if not self.config.scale_out:
            text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise ApiError(403, "PermissionDeniedError", text)
        body = self._json(exchange)
        check(body)
        model, adapter = self._model_of(body)
        call = read(body, model, adapter, self._limits)
        rendered = [
            {
                "request_id": f"{prefix}-{self._identities.getrandbits(64):016x}",
                "token_ids": prompt.tolist(),
                "token_offsets": None,
                "features": None,
                "content_parts": None,
                "sampling_params": {
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "repetition_penalty": 1.0,
                    "temperature": 1.0 if body.get("temperature") is None else float(body["temperature"]),
                    "stop": [],
                    "stop_token_ids": [],
                    "max_tokens": call.max_tokens,
                    "output_kind": 2,
                    "skip_clone": True,
                    "bad_words": [],
                    "skip_reading_prefix_cache": False,
                },
                "model": model,
                "reasoning_ended": None,
                "reasoning_parser_kwargs": None,
                "return_token_ids": None,
                "output_mode": "tokens",
                "stream": call.stream,
                "stream_options": None,
                "cache_salt": body.get("cache_salt"),
                "priority": 0,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
            }
            for prompt in call.prompts
        ]
        self._respond(exchange, 200, orjson.dumps(rendered[0] if prefix == "chatcmpl" else rendered))

    def _count_tokens(self, exchange: Exchange) -> None:
        body = self._json(exchange)
        self._model_of(body)
        self._respond(exchange, 200, orjson.dumps({"input_tokens": calls.count_message_tokens(body)}))

    def _load_adapter(self, exchange: Exchange) -> None:
        body = self._json(exchange)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            text = "Both 'lora_name' and 'lora_path' must be provided."
            raise ApiError(400, "InvalidUserInput", text)
        if name in self._adapters and not body.get("load_inplace"):
            text = f"The lora adapter '{name}' has already been loaded."
            raise ApiError(400, "InvalidUserInput", text)
        if len(self._adapters) >= MAX_ADAPTERS:
            raise ApiError(400, "BadRequestError", f"No more than {MAX_ADAPTERS} adapters can be loaded.")
        self._adapters[name] = path
        self.metrics.http(exchange.path, exchange.method, 200)
        text = f"Success: LoRA adapter '{name}' added successfully."
        exchange.respond(200, text.encode(), "text/plain; charset=utf-8")

    def _unload_adapter(self, exchange: Exchange) -> None:
        name = self._json(exchange).get("lora_name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._adapters:
            raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self._adapters[name]
        self.metrics.http(exchange.path, exchange.method, 200)
        text = f"Success: LoRA adapter '{name}' removed successfully."
        exchange.respond(200, text.encode(), "text/plain; charset=utf-8")

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        # Its event waits for the next batch: vLLM publishes from scheduler steps only.
        done = self.model.reset_prefix_cache()
        self._respond(exchange, 200, orjson.dumps({"success": done}))

    def _sleep(self, exchange: Exchange) -> None:
        level = parse_qs(exchange.query).get("level", ["1"])[0]
        if level not in ("0", "1", "2"):
            raise calls.invalid("int_parsing", "query.level", "Input should be a valid integer", level)
        self.abort_all()
        self.model.reset_prefix_cache()
        self._sleep_level = max(1, int(level))
        self._respond(exchange, 200)

    def _wake_up(self, exchange: Exchange) -> None:
        self._sleep_level = 0
        if self.model.has_work:
            self._wake()
        self._respond(exchange, 200)

    def _is_sleeping(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, orjson.dumps({"is_sleeping": self._sleep_level > 0}))

    # -- the tests' side door

    def _handle_sim(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        try:
            if path == "/sim/fault" and method == "POST":
                self._set_fault(exchange)
            elif path == "/sim/stats" and method == "GET":
                wanted = parse_qs(exchange.query).get("request_id")
                exchange.respond(200, orjson.dumps(self.stats(wanted[0] if wanted else None)))
            elif path == "/sim/wait" and method == "GET":
                self._wait(exchange)
            else:
                exchange.respond(404, b'{"detail":"Not Found"}')
        except ValueError as error:
            exchange.respond(400, orjson.dumps({"error": str(error)}))

    def _set_fault(self, exchange: Exchange) -> None:
        try:
            body = orjson.loads(exchange.body)
        except orjson.JSONDecodeError:
            raise ValueError("the body is not JSON") from None
        if not isinstance(body, dict):
            raise ValueError('expected {"kind": ..., "value": ..., "count": ...}')
        if body.get("kind") == "clear":
            self.faults.clear()
        else:
            try:
                kind = FaultKind(str(body.get("kind")))
            except ValueError:
                kinds = ", ".join(fault.value for fault in FaultKind)
                raise ValueError(f"kind: expected clear or one of {kinds}") from None
            self.faults.set(kind, body.get("value", True), body.get("count"))
        # The answer comes when it is done: the port open or closed, the cache empty.
        self._applying = self._loop.create_task(self._apply_and_answer(exchange))

    async def _apply_and_answer(self, exchange: Exchange) -> None:
        try:
            await self.apply_faults(exchange)
        except OSError as error:
            exchange.respond(500, orjson.dumps({"error": str(error)}))
            return
        exchange.respond(200, orjson.dumps({"faults": self.faults.active()}))

    async def apply_faults(self, spared: Exchange | None = None) -> None:
        """Do what is done once, not per request: close or open the port, restart cold. OSError if the port is lost."""
        if self.faults.peek(FaultKind.COLD_RESTART):
            self.faults.set(FaultKind.COLD_RESTART, None)
            self.cold_restart(spared)
        refuse = self.faults.peek(FaultKind.REFUSE)
        if refuse is None and self._server is None and not self.draining:
            await self._listen()
        elif refuse is not None and self._server is not None:
            server, self._server = self._server, None
            server.close()
            for connection in list(self.connections):
                if not connection.serves(spared):
                    connection.reset()
            await asyncio.sleep(0)  # uvloop closes the listening socket in the next iteration
            if refuse is not True:
                self.clock.call_later(float(refuse), self._accept_again)

    def _accept_again(self) -> None:
        self.faults.set(FaultKind.REFUSE, None)
        self._applying = self._loop.create_task(self.apply_faults())

    def cold_restart(self, spared: Exchange | None = None) -> None:
        """As if the process had been killed and started again, on the same ports."""
        for connection in list(self.connections):
            if not connection.serves(spared):
                connection.reset()
        for request in self.model.requests():
            serving = self._serving.pop(request.request_id, None)
            self.model.abort(request.request_id)
            if serving is not None and not serving.exchange.done:
                serving.exchange.stall()
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None
        if self.publisher is not None:
            self.publisher.restart()
        self._adapters.clear()
        self._begin_life()

    def stats(self, request_id: str | None = None) -> dict[str, Any]:
        """Exact counts; with a request id (x-request-id) only what is known of it."""
        if request_id is not None:
            return {"request_id": request_id, "tries": self._records.get(request_id, [])}
        counts, model = self.counts, self.model
        return {
            "requests": counts.requests,
            "accepted": counts.accepted,
            "running": len(model.running),
            "waiting": len(model.waiting),
            "open": self._server_load,
            "finished": counts.finished,
            "aborted": counts.aborted,
            "rejected": counts.rejected,
            "stalled": counts.stalled,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "generated_tokens": counts.generated_tokens,
            "connections": len(self.connections),
            "preemptions": model.stats.preemptions,
            "steps": model.stats.steps,
            "cached_blocks": model.pool.cached_blocks,
            "free_blocks": model.pool.free_blocks,
            "kv_event_sequence": self.publisher.sequence if self.publisher is not None else None,
            "faults": self.faults.active(),
            "by_request_id": dict(self._records),
        }

    def _wait(self, exchange: Exchange) -> None:
        """GET /sim/wait?aborted=1&requests=2: answers once each count is at least so high (408 after timeout_s)."""
        query = parse_qs(exchange.query)
        timeout_s = min(float(query.pop("timeout_s", ["10"])[0]), MAX_WAIT_S)
        known = self.stats()
        wanted: dict[str, int] = {}
        for name, values in query.items():
            if not isinstance(known.get(name), int):
                raise ValueError(f"{name}: not a count of /sim/stats")
            wanted[name] = int(values[0])
        if all(known[name] >= least for name, least in wanted.items()):
            exchange.respond(200, orjson.dumps({name: known[name] for name in wanted}))
            return
        if len(self._waiters) >= MAX_WAITERS:
            raise ValueError(f"more than {MAX_WAITERS} wait already")
        waiter = (wanted, exchange)
        self._waiters.append(waiter)
        exchange.on_gone = lambda: self._waiters.remove(waiter)
        self.clock.call_later(timeout_s, self._wait_expired, waiter)

    def _wait_expired(self, waiter: tuple[dict[str, int], Exchange]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            known = self.stats()
            waiter[1].respond(408, orjson.dumps({name: known[name] for name in waiter[0]}))

    def _changed(self) -> None:
        """A count moved: answer who waits for it."""
        if not self._waiters:
            return
        known = self.stats()
        for waiter in list(self._waiters):
            wanted, exchange = waiter
            if all(known[name] >= least for name, least in wanted.items()):
                self._waiters.remove(waiter)
                exchange.respond(200, orjson.dumps({name: known[name] for name in wanted}))

    def _note_request(self, exchange: Exchange) -> dict[str, Any]:
        self.counts.requests += 1
        request_id = exchange.headers.get("x-request-id", "")[:256]
        record: dict[str, Any] = {"path": exchange.path, "state": "read"}
        if request_id:
            tries = self._records.setdefault(request_id, [])
            if len(tries) < MAX_TRIES_PER_ID:
                tries.append(record)
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        return record


def route_table(config: SimConfig) -> dict[str, dict[str, Handler]]:
    """Path -> method -> handler; which paths there are depends on the flags, as in vLLM."""
    get, post = "GET", "POST"
    table: dict[str, dict[str, Handler]] = {
        "/health": {get: SimServer._health},
        "/ping": {get: SimServer._health, post: SimServer._health},
        "/version": {get: SimServer._version},
        "/load": {get: SimServer._load},
        "/metrics": {get: SimServer._metrics},
        "/kv_event_sources": {get: SimServer._kv_event_sources},
        "/tokenize": {post: SimServer._tokenize},
        "/detokenize": {post: SimServer._detokenize},
        "/invocations": {post: SimServer._invocations},
        "/v1/models": {get: SimServer._models},
    }
    if config.pooling:
        table["/v1/embeddings"] = {post: SimServer._embeddings}
    else:
        table |= {
            "/v1/chat/completions": {post: SimServer._chat},
            "/v1/completions": {post: SimServer._completions},
            "/v1/responses": {post: SimServer._responses},
            "/v1/messages": {post: SimServer._messages},
            "/v1/messages/count_tokens": {post: SimServer._count_tokens},
            "/v1/chat/completions/render": {post: SimServer._render_chat},
            "/v1/completions/render": {post: SimServer._render_completion},
        }
    if config.lora:
        table["/v1/load_lora_adapter"] = {post: SimServer._load_adapter}
        table["/v1/unload_lora_adapter"] = {post: SimServer._unload_adapter}
    if config.dev_mode:
        table |= {
            "/reset_prefix_cache": {post: SimServer._reset_prefix_cache},
            "/sleep": {post: SimServer._sleep},
            "/wake_up": {post: SimServer._wake_up},
            "/is_sleeping": {get: SimServer._is_sleeping},
        }
    return table
