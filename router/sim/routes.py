"""Every path of the simulated engine but the tests' own: which there are, and who answers."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from random import Random
from typing import Any
from urllib.parse import parse_qs

import orjson

from router.clock import Clock
from router.sim import calls
from router.sim.adapters import Adapters
from router.sim.calls import ApiError, Call, CallLimits
from router.sim.engine import VERSION, SimEngine
from router.sim.faults import FaultKind, Faults
from router.sim.http_protocol import Exchange
from router.sim.inference import Inference
from router.sim.realtime import RealtimeSession
from router.sim.sim_config import SimConfig
from router.sim.tokenizer import VOCABULARY, TokenTexts

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"
MAX_LEARNED_BYTES = 262_144  # of a text given to /tokenize, for /detokenize


class Routes:
    def __init__(
        self,
        config: SimConfig,
        clock: Clock,
        wall_time: Callable[[], float],
        faults: Faults,
        adapters: Adapters,
        engine: SimEngine,
        inference: Inference,
        identities: Random,
    ) -> None:
        self._config = config
        self._clock = clock
        self._wall_time = wall_time
        self._faults = faults
        self._adapters = adapters
        self._engine = engine
        self._inference = inference
        self._identities = identities
        self._texts = TokenTexts()
        self._table = route_table(config)

    def handle(self, exchange: Exchange) -> None:
        """Answer it, now or later; what vLLM refuses is refused in its words."""
        path, method = exchange.path, exchange.method
        if self._config.request_id_headers:
            given = exchange.headers.get("x-request-id")
            exchange.response_id = given or f"{self._identities.getrandbits(128):032x}"
        if self._config.api_keys and path.startswith("/v1") and not self._authorized(exchange):
            exchange.vary = False
            exchange.respond(401, b'{"error":"Unauthorized"}')
            return
        if exchange.websocket_key is not None:
            self._websocket(exchange)
            return
        methods = self._table.get(path)
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
            self._respond(exchange, error.status, error.body(path))

    def _authorized(self, exchange: Exchange) -> bool:
        scheme, _, token = exchange.headers.get("authorization", "").partition(" ")
        given = token.encode("latin-1", "replace")
        matches = [hmac.compare_digest(given, key.encode()) for key in self._config.api_keys]
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
        self._engine.metrics.http(handler or exchange.path, exchange.method, status)
        exchange.respond(status, body, headers=headers or ())

    # -- inference

    def _chat(self, exchange: Exchange) -> None:
        self._inference.infer(exchange, calls.check_chat, calls.read_chat)

    def _completions(self, exchange: Exchange) -> None:
        self._inference.infer(exchange, calls.check_completion, calls.read_completion)

    def _responses(self, exchange: Exchange) -> None:
        self._inference.infer(exchange, None, calls.read_responses)

    def _messages(self, exchange: Exchange) -> None:
        self._inference.infer(exchange, calls.check_messages, calls.read_messages)

    def _embeddings(self, exchange: Exchange) -> None:
        self._inference.embed(exchange)

    def _invocations(self, exchange: Exchange) -> None:
        """SageMaker's one path: the body tells what is meant."""
        body = calls.read_body(exchange.content_type, exchange.body)
        if self._config.pooling:
            self._embeddings(exchange)
        elif "messages" in body:
            self._chat(exchange)
        elif "prompt" in body:
            self._completions(exchange)
        else:
            raise calls.refused("Cannot find suitable handler for request. Expected one of: messages, prompt.")

    # -- what the engine says of itself

    def _models(self, exchange: Exchange) -> None:
        fault = self._faults.take(FaultKind.BAD_MODELS)
        if fault == "hang":
            exchange.stall()
            return
        if fault == "error":
            raise calls.ENGINE_DEAD
        if fault == "garbage":
            self._respond(exchange, 200, b'{"object":"list","data":[{"id":')
            return
        created = int(self._wall_time())
        data: list[dict[str, Any]] = []
        if fault != "empty":
            names = self._config.served_model_names
            data = [self._model_card(name, created, self._config.model_root, None) for name in names]
            data += [self._model_card(name, created, path, names[0]) for name, path in self._adapters.loaded.items()]
        self._respond(exchange, 200, orjson.dumps({"object": "list", "data": data}))

    def _model_card(self, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self._config.max_model_len if parent is None else None,
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
        dead = self._faults.peek(FaultKind.UNHEALTHY) or self._faults.peek(FaultKind.ENGINE_DEAD)
        # Not counted in http_requests_total, nor is /metrics: vLLM excludes both.
        exchange.respond(503 if dead else 200, b"", None)

    def _version(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, orjson.dumps({"version": VERSION}))

    def _load(self, exchange: Exchange) -> None:
        load = self._inference.open_calls if self._config.load_tracking else 0
        exchange.respond(200, orjson.dumps({"server_load": load}))

    def _metrics(self, exchange: Exchange) -> None:
        delay_s = self._faults.take(FaultKind.SLOW_METRICS)
        if delay_s is None:
            self._send_metrics(exchange)
        else:
            self._clock.call_later(delay_s, self._send_metrics, exchange)

    def _send_metrics(self, exchange: Exchange) -> None:
        if not exchange.done:
            exchange.respond(200, self._engine.metrics.render(), METRICS_TYPE)

    def _kv_event_sources(self, exchange: Exchange) -> None:
        sources = self._engine.publisher.sources() if self._engine.publisher is not None else {}
        self._respond(exchange, 200, orjson.dumps(sources))

    def _tokenize(self, exchange: Exchange) -> None:
        body = calls.read_body(exchange.content_type, exchange.body)
        self._adapters.model_of(body)
        tokens, texts, text = calls.read_tokenize(body)
        if text:
            self._texts.learn(text[:MAX_LEARNED_BYTES])
        reply = {
            "count": len(tokens),
            "max_model_len": self._config.max_model_len,
            "tokens": tokens.tolist(),
            "token_strs": texts,
        }
        self._respond(exchange, 200, orjson.dumps(reply))

    def _detokenize(self, exchange: Exchange) -> None:
        body = calls.read_body(exchange.content_type, exchange.body)
        self._adapters.model_of(body)
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
        if not self._config.scale_out:
            text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise ApiError(403, "PermissionDeniedError", text)
        body = calls.read_body(exchange.content_type, exchange.body)
        check(body)
        model, adapter = self._adapters.model_of(body)
        call = read(body, model, adapter, self._inference.limits)
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
        body = calls.read_body(exchange.content_type, exchange.body)
        calls.check_message_prompt(body)
        self._adapters.model_of(body)
        count = calls.count_message_tokens(body)
        reply = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        self._respond(exchange, 200, orjson.dumps(reply))

    def _websocket(self, exchange: Exchange) -> None:
        """There is one, and only an audio model has it; all others are refused as uvicorn does."""
        if exchange.path != "/v1/realtime" or not self._config.realtime:
            exchange.refuse_websocket()
            return
        RealtimeSession(exchange, self._inference, self._adapters, self._identities, self._wall_time).begin()

    # -- changing it

    def _load_adapter(self, exchange: Exchange) -> None:
        self._respond_text(exchange, self._adapters.load(calls.read_body(exchange.content_type, exchange.body)))

    def _unload_adapter(self, exchange: Exchange) -> None:
        self._respond_text(exchange, self._adapters.unload(calls.read_body(exchange.content_type, exchange.body)))

    def _respond_text(self, exchange: Exchange, text: str) -> None:
        self._engine.metrics.http(exchange.path, exchange.method, 200)
        exchange.respond(200, text.encode(), TEXT_TYPE)

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        # Its event waits for the next batch: vLLM publishes from scheduler steps only.
        done = self._engine.model.reset_prefix_cache()
        self._respond(exchange, 200, orjson.dumps({"success": done}))

    def _sleep(self, exchange: Exchange) -> None:
        level = parse_qs(exchange.query).get("level", ["1"])[0]
        if level not in ("0", "1", "2"):
            raise calls.invalid("int_parsing", "query.level", "Input should be a valid integer", level)
        self._inference.abort_all()
        self._engine.sleep(int(level))
        self._respond(exchange, 200)

    def _wake_up(self, exchange: Exchange) -> None:
        self._engine.wake_up()
        self._respond(exchange, 200)

    def _is_sleeping(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, orjson.dumps({"is_sleeping": self._engine.sleep_level > 0}))


Handler = Callable[[Routes, Exchange], None]


def route_table(config: SimConfig) -> dict[str, dict[str, Handler]]:
    """Path -> method -> handler; which paths there are depends on the flags, as in vLLM."""
    get, post = "GET", "POST"
    table: dict[str, dict[str, Handler]] = {
        "/health": {get: Routes._health},
        "/ping": {get: Routes._health, post: Routes._health},
        "/version": {get: Routes._version},
        "/load": {get: Routes._load},
        "/metrics": {get: Routes._metrics},
        "/kv_event_sources": {get: Routes._kv_event_sources},
        "/tokenize": {post: Routes._tokenize},
        "/detokenize": {post: Routes._detokenize},
        "/invocations": {post: Routes._invocations},
        "/v1/models": {get: Routes._models},
    }
    if config.pooling:
        table["/v1/embeddings"] = {post: Routes._embeddings}
    else:
        table |= {
            "/v1/chat/completions": {post: Routes._chat},
            "/v1/completions": {post: Routes._completions},
            "/v1/responses": {post: Routes._responses},
            "/v1/messages": {post: Routes._messages},
            "/v1/messages/count_tokens": {post: Routes._count_tokens},
            "/v1/chat/completions/render": {post: Routes._render_chat},
            "/v1/completions/render": {post: Routes._render_completion},
        }
    if config.lora:
        table["/v1/load_lora_adapter"] = {post: Routes._load_adapter}
        table["/v1/unload_lora_adapter"] = {post: Routes._unload_adapter}
    if config.dev_mode:
        table |= {
            "/reset_prefix_cache": {post: Routes._reset_prefix_cache},
            "/sleep": {post: Routes._sleep},
            "/wake_up": {post: Routes._wake_up},
            "/is_sleeping": {get: Routes._is_sleeping},
        }
    return table
