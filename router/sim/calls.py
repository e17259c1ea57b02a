"""API bodies in, calls out: what vLLM's front end reads, checks and refuses, with its words.

`read_*` functions raise ApiError with the status and body of the recorded engine. Unknown fields are accepted.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson
import xxhash

from router.sim import answers, chat_template
from router.sim.answers import Answer
from router.sim.engine_model import EngineRequest, Finish
from router.sim.tokenizer import VOCABULARY, block_hashes, tokenize_segments, tokenize_text

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20

AUDIO_TOKEN_BYTES = 2560  # 80 ms of 16 kHz, 16 bits
MESSAGES_PATH = "/v1/messages"
VALIDATION = "Bad Request"  # the type of an error that FastAPI found


class Api(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    REALTIME = "realtime"


class ApiError(Exception):
    """An answer in vLLM's first shape of error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self, path: str = "") -> bytes:
        """As the answer to a request for `path`: Anthropic's paths have a shape of their own, but not for what FastAPI
        refuses before the handler."""
        if path.startswith(MESSAGES_PATH) and self.kind != VALIDATION:
            return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": self.message}})
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})

    def event(self, path: str = "") -> bytes:
        """As the data of a stream: the recorded engine writes it with spaces."""
        if path.startswith(MESSAGES_PATH):
            data = orjson.dumps({"type": "error", "error": {"type": "internal_error", "message": self.message}})
            return b"event: error\ndata: " + data + b"\n\n"
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def invalid(kind: str, location: str, message: str, given: Any, context: str = "") -> ApiError:
    """A validation error as vLLM words it."""
    shown = f"<dict of {len(given)} items>" if isinstance(given, dict) else str(given)[:200]
    text = f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', 'input': '{shown}'{context}}}"
    return ApiError(400, VALIDATION, f"1 validation error:\n  {text}", location)


def refused(message: str, param: str | None = None, value: Any = None) -> ApiError:
    """A value that is well formed and not acceptable."""
    if param is not None:
        message += f" (parameter={param}, value={value})" if value is not None else f" (parameter={param})"
    return ApiError(400, "BadRequestError", message, param)


UNSUPPORTED_TYPE = ApiError(
    400, VALIDATION, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
)
ENGINE_DEAD = ApiError(
    500, "InternalServerError", "EngineCore encountered an issue. See stack trace (above) for the root cause."
)
BUSY = ApiError(
    503,
    "Service Unavailable",
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.",
)


def read_json(body: bytes) -> dict[str, Any]:
    """The body as an object."""
    if not body:
        raise invalid("missing", "body", "Field required", None)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(body)
        except RecursionError:
            raise invalid("json_invalid", "body.0", "JSON decode error", {}) from None
        except json.JSONDecodeError as error:
            context = f", 'ctx': {{'error': '{error.msg}'}}"
            raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error", {}, context) from None
        except UnicodeDecodeError:
            raise ApiError(400, "BadRequestError", "There was an error parsing the body") from None
    if not isinstance(value, dict):
        raise invalid("model_attributes_type", "body", "Input should be a valid dictionary or object", value)
    return value


def read_body(media_type: str, body: bytes) -> dict[str, Any]:
    """The object in a body of this content-type."""
    media = media_type.partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise UNSUPPORTED_TYPE
    return read_json(body)


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        if value.isdecimal() and len(value) < 20:
            return int(value)
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, value)
    raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise invalid("float_type", f"body.{name}", "Input should be a valid number", value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    raise invalid("bool_type", f"body.{name}", "Input should be a valid boolean", value)


def _stops(body: Mapping[str, Any], name: str = "stop") -> list[str]:
    value = body.get(name)
    if value is None:
        return []
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return given[:64]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What the front end of one engine checks and fills in. Lengths in tokens."""

    max_model_len: int
    default_output_tokens: int
    block_size: int
    auto_tool_choice: bool
    seed: int


class Choice:
    """One sequence of a call: what the engine works on, and how much of it the client has."""

    __slots__ = ("adapter", "answer", "finish", "generated", "index", "prompt", "request", "salt", "sent", "sequence")

    def __init__(
        self, index: int, prompt: array[int], answer: Answer, limits: CallLimits, salt: str | None, adapter: str | None
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.answer = answer
        self.salt = salt
        self.adapter = adapter
        self.sequence = prompt + answer.tokens
        self.generated = 0
        self.sent = 0
        self.finish: Finish | None = None
        extra = f"{adapter or ''}\0{salt or ''}".encode("utf-8", "surrogatepass")
        self.request = EngineRequest(
            "",
            len(prompt),
            len(answer),
            block_hashes(self.sequence, limits.block_size, extra),
            finish=answer.finish,
            payload=self,
        )

    # What the KV events of its blocks say.

    def event_tokens(self, start: int, end: int) -> list[int]:
        return self.sequence[start:end].tolist()

    def event_extra_keys(self, block: int) -> list[Any] | None:
        keys: list[Any] = [] if self.adapter is None else [self.adapter]
        if self.salt is not None and block == 0:
            keys.append(self.salt)
        return keys or None

    @property
    def event_adapter(self) -> str | None:
        return self.adapter


@dataclass(slots=True)
class Call:
    """One inference request of a client, with `len(prompts) * n` choices."""

    api: Api
    body: dict[str, Any]
    model: str
    n: int
    max_tokens: int
    choices: list[Choice]
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None  # how many alternatives; None: not asked for
    tool: str | None = None  # the answer is a call of this function
    tool_required: bool = False
    prompts: list[array[int]] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(choice.generated for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Hits of the first choice of each prompt: the others find its blocks."""
        return sum(self.choices[at].request.cached_tokens or 0 for at in range(0, len(self.choices), self.n))

    def created_cache_tokens(self, block_size: int) -> int:
        """Prompt tokens in full blocks that were not in the cache."""
        cacheable = sum(len(prompt) // block_size * block_size for prompt in self.prompts)
        return max(0, cacheable - self.cached_tokens)

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)


def too_long(tokens: int, limits: CallLimits, *, exact: bool) -> ApiError:
    # The recorded engine stops tokenizing text one token over the limit, so it does not know the length.
    shown = tokens if exact else limits.max_model_len + 1
    return refused(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
        f"{'' if exact else 'at least '}{shown} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
        shown,
    )


def _check_sampling(body: Mapping[str, Any], limits: CallLimits, max_tokens: int | None, name: str) -> None:
    temperature = _number(body, "temperature")
    if temperature is not None and temperature < 0:
        raise refused(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    top_p = _number(body, "top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise refused(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if max_tokens is not None and max_tokens < 1:
        raise refused(f"{name} must be at least 1, got {max_tokens}.", name, max_tokens)
    if max_tokens is not None and max_tokens > limits.max_model_len:
        message = f"{name}={max_tokens} cannot be greater than max_model_len={limits.max_model_len}."
        raise refused(f"{message} Please request fewer output tokens.", name, max_tokens)


def _room(tokens: int, limits: CallLimits, max_tokens: int | None, *, exact: bool) -> tuple[int, Finish]:
    """How many tokens the answer gets, and how it ends."""
    room = limits.max_model_len - tokens
    if room < 1:
        raise too_long(tokens, limits, exact=exact)
    if max_tokens is None:
        wanted = limits.default_output_tokens
        return (wanted, Finish.STOP) if wanted <= room else (room, Finish.LENGTH)
    if max_tokens > room:
        raise refused(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{max_tokens} output tokens and your prompt contains {tokens} input tokens, for a total of "
            f"{tokens + max_tokens} tokens. Please reduce the length of the input prompt or the number of requested "
            "output tokens.",
            "input_tokens",
            tokens,
        )
    return max_tokens, Finish.LENGTH


def _choices(body: Mapping[str, Any]) -> int:
    n = _integer(body, "n")
    if n is None:
        return 1
    if n < 1 or n > MAX_CHOICES:
        raise refused(f"n must be between 1 and {MAX_CHOICES}, got {n}.", "n", n)
    return n


def _salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise refused("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    return salt


def _seed_of(prompt: array[int], index: int, limits: CallLimits) -> int:
    return xxhash.xxh3_64_intdigest(prompt.tobytes(), limits.seed * 1_000_003 + index)


def read_stream_options(body: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """(stream, include_usage, continuous_usage_stats)."""
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return stream, False, False
    if not stream:
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
    if not isinstance(options, dict):
        raise invalid("model_attributes_type", "body.stream_options", "Input should be a valid dictionary", options)
    usage = options.get("include_usage", True) is not False
    return stream, usage, usage and options.get("continuous_usage_stats") is True


def _messages(body: dict[str, Any], name: str = "messages") -> list[Any]:
    if name not in body:
        raise invalid("missing", f"body.{name}", "Field required", body)
    messages = body[name]
    if not isinstance(messages, list):
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", messages)
    if not all(isinstance(message, dict) for message in messages):
        raise invalid("dict_type", f"body.{name}", "Input should be a valid dictionary", messages)
    return messages


def _render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, generate: bool = True) -> array[int]:
    try:
        return tokenize_segments(chat_template.render(messages, tools, add_generation_prompt=generate))
    except chat_template.TemplateError as error:
        raise refused(str(error)) from None


def _tools(body: Mapping[str, Any]) -> list[Any] | None:
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("list_type", "body.tools", "Input should be a valid list", tools)
    return tools or None


def _function(tool: Any) -> Mapping[str, Any]:
    """A tool's function, in the chat or in the Responses shape."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _chosen_tool(
    body: Mapping[str, Any], tools: list[Any] | None, limits: CallLimits
) -> tuple[Mapping[str, Any] | None, bool]:
    """The function that the answer must call, and whether by "required"."""
    choice = body.get("tool_choice")
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return None, False
    if not tools:
        raise refused("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "auto":
        if not limits.auto_tool_choice:
            text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            raise refused(text)
        return None, False
    if choice in ("required", "any") or (isinstance(choice, dict) and choice.get("type") == "any"):
        return _function(tools[0]), True
    if isinstance(choice, dict):
        if choice.get("type") == "auto":
            return None, False
        name = _function(choice).get("name")
        for tool in tools:
            if _function(tool).get("name") == name:
                return _function(tool), False
    raise refused("The tool specified in `tool_choice` does not match any of the specified `tools`.", "tool_choice")


def _schema(body: Mapping[str, Any]) -> Any:
    """The JSON schema that the answer must fit; None for free text."""
    given = body.get("response_format")
    if not isinstance(given, dict):
        text = body.get("text")
        given = text.get("format") if isinstance(text, dict) else None
    if not isinstance(given, dict):
        return None
    if given.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    if given.get("type") == "json_schema":
        inner = given.get("json_schema", given)
        return inner.get("schema") if isinstance(inner, dict) else None
    return None


def _chat_like(
    api: Api,
    body: dict[str, Any],
    model: str,
    adapter: str | None,
    limits: CallLimits,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None,
    max_tokens: int | None,
    max_tokens_name: str,
) -> Call:
    stream, usage, continuous = read_stream_options(body)
    function, required = _chosen_tool(body, tools, limits)
    prompt = _render(messages, tools)
    if len(prompt) >= limits.max_model_len:
        raise too_long(len(prompt), limits, exact=False)
    _check_sampling(body, limits, max_tokens, max_tokens_name)
    count, finish = _room(len(prompt), limits, max_tokens, exact=False)
    n = _choices(body) if api is Api.CHAT else 1
    stops = _stops(body) if api is Api.CHAT else _stops(body, "stop_sequences")
    salt = _salt(body)
    schema = _schema(body)
    choices: list[Choice] = []
    for index in range(n):
        seed = _seed_of(prompt, index, limits)
        if function is not None:
            parameters = function.get("parameters") or function.get("input_schema") or {}
            answer = answers.document(answers.json_for_schema(parameters, seed), count)
        elif schema is not None:
            answer = answers.document(answers.json_for_schema(schema, seed), count)
        else:
            answer = answers.words(seed, count, finish, stops)
        choices.append(Choice(index, prompt, answer, limits, salt, adapter))
    logprobs: int | None = None
    if api is Api.CHAT and _flag(body, "logprobs"):
        logprobs = min(_integer(body, "top_logprobs") or 0, MAX_TOP_LOGPROBS)
    return Call(
        api=api,
        body=body,
        model=model,
        n=n,
        max_tokens=count,
        choices=choices,
        stream=stream,
        include_usage=usage,
        continuous_usage=continuous,
        return_token_ids=_flag(body, "return_token_ids"),
        logprobs=logprobs,
        tool=None if function is None else str(function.get("name")),
        tool_required=required,
        prompts=[prompt],
    )


def check_chat(body: dict[str, Any]) -> None:
    """Types that are refused before the model's name is looked at."""
    _messages(body)
    for name in ("max_tokens", "max_completion_tokens", "n", "seed", "top_logprobs"):
        _integer(body, name)
    _number(body, "temperature")
    read_stream_options(body)


def read_chat(body: dict[str, Any], model: str, adapter: str | None, limits: CallLimits) -> Call:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limit = _integer(body, name)
    return _chat_like(Api.CHAT, body, model, adapter, limits, _messages(body), _tools(body), limit, name)


def check_completion(body: dict[str, Any]) -> None:
    for name in ("max_tokens", "n", "seed", "logprobs"):
        _integer(body, name)
    _number(body, "temperature")
    read_stream_options(body)


def read_prompts(body: Mapping[str, Any], limits: CallLimits, name: str = "prompt") -> list[tuple[array[int], bool]]:
    """Prompts as tokens; the flag says that the client gave the ids."""
    given = body.get(name)
    if given is None or given == []:
        raise refused("Either prompt or prompt_embeds must be provided and non-empty.", name)
    if isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or len(given) > MAX_PROMPTS:
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", type(given).__name__)
    prompts: list[tuple[array[int], bool]] = []
    for item in given:
        if isinstance(item, str):
            prompts.append((tokenize_text(item.encode("utf-8", "surrogatepass")), False))
            continue
        if not isinstance(item, list) or not all(type(token) is int for token in item):
            raise invalid("int_type", f"body.{name}", "Input should be a valid integer", type(item).__name__)
        for token in item:
            if not 0 <= token < VOCABULARY:
                raise refused(f"Token id {token} is out of vocabulary")
        prompts.append((array("I", item), True))
    for tokens, exact in prompts:
        if not tokens:
            raise refused("The decoder prompt cannot be empty")
        if len(tokens) >= limits.max_model_len:
            raise too_long(len(tokens), limits, exact=exact)
    return prompts


def read_completion(body: dict[str, Any], model: str, adapter: str | None, limits: CallLimits) -> Call:
    stream, usage, continuous = read_stream_options(body)
    given = read_prompts(body, limits)
    limit = _integer(body, "max_tokens")
    _check_sampling(body, limits, limit, "max_tokens")
    n, salt, stops = _choices(body), _salt(body), _stops(body)
    choices: list[Choice] = []
    asked = 0
    for prompt, exact in given:
        room = limits.max_model_len - len(prompt)
        count, finish = _room(len(prompt), limits, limit if limit is not None else min(16, room), exact=exact)
        asked = max(asked, count)
        for index in range(n):
            answer = answers.words(_seed_of(prompt, index, limits), count, finish, stops)
            choices.append(Choice(len(choices), prompt, answer, limits, salt, adapter))
    logprobs = _integer(body, "logprobs")
    return Call(
        api=Api.COMPLETION,
        body=body,
        model=model,
        n=n,
        max_tokens=asked,
        choices=choices,
        stream=stream,
        include_usage=usage,
        continuous_usage=continuous,
        return_token_ids=_flag(body, "return_token_ids"),
        logprobs=None if logprobs is None else min(max(logprobs, 0), MAX_TOP_LOGPROBS),
        prompts=[prompt for prompt, _ in given],
    )


def read_responses(body: dict[str, Any], model: str, adapter: str | None, limits: CallLimits) -> Call:
    if "input" not in body:
        # a validator of vLLM's own has put in a field by then
        raise invalid("missing", "body.input", "Field required", {**body, "": None})
    if not isinstance(body["input"], str | list):
        raise invalid("list_type", "body.input", "Input should be a valid list", body["input"])
    limit = _integer(body, "max_output_tokens")
    try:
        messages = chat_template.from_responses(body)
    except chat_template.TemplateError as error:
        raise refused(str(error)) from None
    return _chat_like(Api.RESPONSES, body, model, adapter, limits, messages, _tools(body), limit, "max_output_tokens")


def anthropic_prompt(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools of a /v1/messages or count_tokens body."""
    _messages(body)
    try:
        return chat_template.from_anthropic(body)
    except chat_template.TemplateError as error:
        raise refused(str(error)) from None


def check_messages(body: dict[str, Any]) -> None:
    """What /v1/messages refuses before it looks at the model's name."""
    check_message_prompt(body)
    limit = _integer(body, "max_tokens")
    if limit is None:
        raise invalid("missing", "body.max_tokens", "Field required", body)
    if limit < 1:
        text = "max_tokens must be positive"
        context = f", 'ctx': {{'error': ValueError('{text}')}}"
        raise invalid("value_error", "body.max_tokens", f"Value error, {text}", limit, context)


def check_message_prompt(body: dict[str, Any]) -> None:
    if "model" not in body:
        raise invalid("missing", "body.model", "Field required", body)
    _messages(body)


def read_messages(body: dict[str, Any], model: str, adapter: str | None, limits: CallLimits) -> Call:
    messages, tools = anthropic_prompt(body)
    limit = _integer(body, "max_tokens")
    choice = body.get("tool_choice")
    named = isinstance(choice, dict) and choice.get("type") == "none"
    given = {**body, "tool_choice": "none" if named or (tools is None and choice is None) else choice}
    if tools and choice is None:
        # Anthropic's clients never ask for a parser: without a choice the answer is text.
        given["tool_choice"] = "none"
    # vLLM makes a chat request of it, and refuses that one
    return _chat_like(Api.MESSAGES, given, model, adapter, limits, messages, tools, limit, "max_completion_tokens")


def read_audio(audio: bytes, model: str, limits: CallLimits) -> Call:
    """A transcription: one prompt token and one word for each 80 ms, both from what was said."""
    pieces = [audio[at : at + AUDIO_TOKEN_BYTES] for at in range(0, len(audio), AUDIO_TOKEN_BYTES)]
    prompt = array("I", [xxhash.xxh3_64_intdigest(piece) % VOCABULARY for piece in pieces])
    if 2 * len(prompt) >= limits.max_model_len:
        raise too_long(len(prompt), limits, exact=True)
    answer = answers.words(_seed_of(prompt, 0, limits), len(prompt), Finish.STOP)
    choice = Choice(0, prompt, answer, limits, None, None)
    return Call(
        api=Api.REALTIME,
        body={},
        model=model,
        n=1,
        max_tokens=len(answer),
        choices=[choice],
        stream=True,
        prompts=[prompt],
    )


def count_message_tokens(body: dict[str, Any]) -> int:
    messages, tools = anthropic_prompt(body)
    return len(_render(messages, tools))


def read_tokenize(body: dict[str, Any]) -> tuple[array[int], list[str] | None, bytes]:
    """(/tokenize's tokens, their texts if asked for, the text that they came from)."""
    if "messages" in body:
        generate = body.get("add_generation_prompt")
        tokens = _render(_messages(body), _tools(body), generate is not False)
        return tokens, None, b""
    prompt = body.get("prompt")
    if prompt is None:
        raise invalid("missing", "body.prompt", "Field required", body)
    if not isinstance(prompt, str):
        raise invalid("string_type", "body.prompt", "Input should be a valid string", type(prompt).__name__)
    text = prompt.encode("utf-8", "surrogatepass")
    tokens = tokenize_text(text)
    texts: list[str] | None = None
    if _flag(body, "return_token_strs"):
        texts = [text[at : at + 4].decode("utf-8", "replace") for at in range(0, len(text), 4)]
    return tokens, texts, text
