"""Calls in, bytes out: JSON bodies and server-sent events with the fields, order and spelling of vLLM 0.32.

Events are put together from strings: everything before and after a token's text is made once per choice.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

import orjson

from router.sim.answers import WORDS
from router.sim.calls import Api, Call, Choice
from router.sim.engine_model import Finish
from router.sim.websocket import json_message

EMBEDDING_WIDTH = 64
DONE = b"data: [DONE]\n\n"


def text_json(text: str) -> str:
    return orjson.dumps(text).decode()


def ids_json(tokens: Any) -> str:
    return orjson.dumps(list(tokens)).decode()


class Reply(Protocol):
    """How one API answers. Events of a stream: `opening` with the first token, `delta` per choice, `closing` last."""

    def opening(self) -> list[bytes]: ...

    def delta(self, choice: Choice) -> list[bytes]:
        """What the choice has generated and not sent; marks it as sent."""
        ...

    def closing(self) -> list[bytes]: ...

    def body(self) -> bytes: ...


class ReplyContext:
    """What all replies of one engine share. `cached_tokens` overrides the truth (a fault)."""

    __slots__ = ("block_size", "cached_tokens", "created", "details", "fingerprint", "identity")

    def __init__(
        self,
        identity: str,
        created: int,
        fingerprint: str,
        block_size: int,
        *,
        details: bool,
        cached_tokens: int | None = None,
    ) -> None:
        self.identity = identity  # after the prefix: chatcmpl-IDENTITY
        self.created = created
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.details = details
        self.cached_tokens = cached_tokens

    def cached(self, call: Call) -> int:
        return call.cached_tokens if self.cached_tokens is None else self.cached_tokens


def reply_for(call: Call, context: ReplyContext) -> Reply:
    makers: dict[Api, Callable[[Call, ReplyContext], Reply]] = {
        Api.CHAT: ChatReply,
        Api.COMPLETION: CompletionReply,
        Api.RESPONSES: ResponsesReply,
        Api.MESSAGES: MessagesReply,
        Api.REALTIME: RealtimeReply,
    }
    return makers[call.api](call, context)


def _new_pieces(choice: Choice) -> tuple[int, int, str]:
    """The unsent stretch of the answer and its text; now sent."""
    start, end = choice.sent, choice.generated
    choice.sent = end
    return start, end, "".join(choice.answer.pieces[start:end])


def tool_identity(context: ReplyContext, index: int = 0) -> str:
    """One spelling for all APIs."""
    return f"chatcmpl-tool-{context.identity}-{index}"


def _logprob(token: int, rank: int) -> float:
    """A plausible, deterministic log probability."""
    return -(token % 997 + 1) / 1000.0 - rank


def _usage(call: Call, context: ReplyContext, *, full: bool) -> dict[str, Any]:
    """`usage` of a body (`full`) or of the last event of a stream."""
    prompt, completion = call.prompt_tokens, call.completion_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    cached = context.cached(call)
    if call.api is Api.CHAT:
        created: int | None = call.created_cache_tokens(context.block_size)
    else:
        created = None
    if full:
        details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
        usage["prompt_tokens_details"] = details if context.details else None
        usage["completion_tokens_details"] = None
    elif context.details:
        details = {"cached_tokens": cached}
        if created is not None:
            details["created_cache_tokens"] = created
        usage["prompt_tokens_details"] = details
    return usage


class ChatReply:
    def __init__(self, call: Call, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._id = f"chatcmpl-{context.identity}"
        self._head = (
            f'data: {{"id":{text_json(self._id)},"object":"chat.completion.chunk","created":{context.created},'
            f'"model":{text_json(call.model)},"choices":['
        )
        self._fingerprint = f',"system_fingerprint":"{context.fingerprint}"'
        self._tool_open = [False] * len(call.choices)

    def opening(self) -> list[bytes]:
        call = self._call
        ids = ids_json(call.prompts[0]) if call.return_token_ids else "null"
        usage = self._continuous(0)
        return [
            (
                f'{self._head}{{"index":{choice.index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
                f'"finish_reason":null}}]{usage},"prompt_token_ids":{ids},"prompt_text":null}}\n\n'
            ).encode()
            for choice in call.choices
        ]

    def delta(self, choice: Choice) -> list[bytes]:
        call = self._call
        start, end, text = _new_pieces(choice)
        if call.tool is not None:
            return self._tool_delta(choice, text)
        inner = f'"content":{text_json(text)}'
        ids = ids_json(choice.answer.tokens[start:end]) if call.return_token_ids else "null"
        logprobs = "null" if call.logprobs is None else orjson.dumps(self._logprobs(choice, start, end)).decode()
        return [self._chunk(choice, inner, logprobs, ids, last=choice.finish is not None)]

    def _tool_delta(self, choice: Choice, text: str) -> list[bytes]:
        """The function's name, its arguments and the end are deltas of their own."""
        parts = []
        if not self._tool_open[choice.index]:
            self._tool_open[choice.index] = True
            identity = tool_identity(self._context, choice.index)
            function = f'{{"name":{text_json(self._call.tool or "")}}}'
            parts.append(f'{{"id":"{identity}","type":"function","index":0,"function":{function}}}')
        if text:
            parts.append(f'{{"index":0,"function":{{"arguments":{text_json(text)}}}}}')
        events = [
            self._chunk(choice, f'"content":null,"tool_calls":[{part}]', "null", "null", last=False) for part in parts
        ]
        if choice.finish is not None:
            events.append(self._chunk(choice, "", "null", "null", last=True))
        return events

    def _chunk(self, choice: Choice, inner: str, logprobs: str, ids: str, *, last: bool) -> bytes:
        call = self._call
        finish, tail = "null", ""
        if last:
            finish = f'"{self._finish(choice)}","stop_reason":{self._stop(choice)}'
            tail = "" if call.include_usage else self._fingerprint
        return (
            f'{self._head}{{"index":{choice.index},"delta":{{{inner}}},"logprobs":{logprobs},'
            f'"finish_reason":{finish},"token_ids":{ids}}}]{self._continuous(call.completion_tokens)}{tail}}}\n\n'
        ).encode()

    def closing(self) -> list[bytes]:
        call = self._call
        if not call.include_usage:
            return [DONE]
        usage = orjson.dumps(_usage(call, self._context, full=False)).decode()
        return [f'{self._head}],"usage":{usage}{self._fingerprint}}}\n\n'.encode(), DONE]

    def body(self) -> bytes:
        call, context = self._call, self._context
        choices = []
        for choice in call.choices:
            _, end, text = _new_pieces(choice)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text if call.tool is None else "",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
            }
            if call.tool is not None:
                function = {"name": call.tool, "arguments": text}
                identity = tool_identity(context, choice.index)
                message["tool_calls"] = [{"id": identity, "type": "function", "function": function}]
            message["reasoning"] = None
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": None if call.logprobs is None else self._logprobs(choice, 0, end),
                    "finish_reason": self._finish(choice),
                    "stop_reason": choice.answer.stop,
                    "token_ids": list(choice.answer.tokens[:end]) if call.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": context.created,
                "model": call.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": context.fingerprint,
                "usage": _usage(call, context, full=True),
                "prompt_logprobs": None,
                "prompt_token_ids": list(call.prompts[0]) if call.return_token_ids else None,
                "prompt_text": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _finish(self, choice: Choice) -> str:
        # vLLM says tool_calls for "required" and stop for a named function.
        if choice.finish is Finish.STOP and self._call.tool_required:
            return "tool_calls"
        return str(choice.finish)

    def _stop(self, choice: Choice) -> str:
        return "null" if choice.answer.stop is None else text_json(choice.answer.stop)

    def _continuous(self, completion: int) -> str:
        if not self._call.continuous_usage:
            return ""
        prompt = self._call.prompt_tokens
        return (
            f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + completion},'
            f'"completion_tokens":{completion},"completion_tokens_details":null}}'
        )

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        asked = self._call.logprobs or 0
        content = []
        for at in range(start, end):
            piece, token = choice.answer.pieces[at], choice.answer.tokens[at]
            top = []
            for rank in range(asked):
                other = piece if rank == 0 else WORDS[(token + rank) % len(WORDS)]
                top.append({"token": other, "logprob": _logprob(token, rank), "bytes": list(other.encode())})
            entry = {"token": piece, "logprob": _logprob(token, 0), "bytes": list(piece.encode()), "top_logprobs": top}
            content.append(entry)
        return {"content": content}


class CompletionReply:
    def __init__(self, call: Call, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._id = f"cmpl-{context.identity}"
        self._head = (
            f'data: {{"id":{text_json(self._id)},"object":"text_completion","created":{context.created},'
            f'"model":{text_json(call.model)},"choices":['
        )
        self._fingerprint = f',"system_fingerprint":"{context.fingerprint}"'

    def opening(self) -> list[bytes]:
        return []

    def delta(self, choice: Choice) -> list[bytes]:
        call = self._call
        start, end, text = _new_pieces(choice)
        prompt_ids = ids = "null"
        if call.return_token_ids:
            ids = ids_json(choice.answer.tokens[start:end])
            prompt_ids = ids_json(choice.prompt) if start == 0 else "null"
        logprobs = "null" if call.logprobs is None else orjson.dumps(self._logprobs(choice, start, end)).decode()
        finish = "null" if choice.finish is None else f'"{choice.finish}"'
        stop = "null" if choice.finish is None or choice.answer.stop is None else text_json(choice.answer.stop)
        tail = "" if choice.finish is None or call.include_usage else self._fingerprint
        if call.continuous_usage:
            prompt, done = call.prompt_tokens, call.completion_tokens
            usage = f'"prompt_tokens":{prompt},"total_tokens":{prompt + done},"completion_tokens":{done}'
            tail = f',"usage":{{{usage}}}{tail}'
        return [
            (
                f'{self._head}{{"index":{choice.index},"text":{text_json(text)},"logprobs":{logprobs},'
                f'"finish_reason":{finish},"stop_reason":{stop},"prompt_token_ids":{prompt_ids},"token_ids":{ids}}}]'
                f"{tail}}}\n\n"
            ).encode()
        ]

    def closing(self) -> list[bytes]:
        call = self._call
        if not call.include_usage:
            return [DONE]
        usage = orjson.dumps(_usage(call, self._context, full=False)).decode()
        return [f'{self._head}],"usage":{usage}{self._fingerprint}}}\n\n'.encode(), DONE]

    def body(self) -> bytes:
        call, context = self._call, self._context
        choices = []
        for choice in call.choices:
            _, end, text = _new_pieces(choice)
            choices.append(
                {
                    "index": choice.index,
                    "text": text,
                    "logprobs": None if call.logprobs is None else self._logprobs(choice, 0, end),
                    "finish_reason": choice.finish,
                    "stop_reason": choice.answer.stop,
                    "token_ids": list(choice.answer.tokens[:end]) if call.return_token_ids else None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": list(choice.prompt) if call.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        return orjson.dumps(
            {
                "id": self._id,
                "object": "text_completion",
                "created": context.created,
                "model": call.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": context.fingerprint,
                "usage": _usage(call, context, full=True),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        pieces, tokens = choice.answer.pieces[start:end], choice.answer.tokens[start:end]
        offsets = [at * 4 for at in range(start, end)]
        values = [_logprob(token, 0) for token in tokens]
        top = [{piece: value} for piece, value in zip(pieces, values, strict=True)]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": list(pieces), "top_logprobs": top}


class ResponsesReply:
    """/v1/responses. A stream's events carry their name twice: in `event:` and in `type`."""

    def __init__(self, call: Call, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._id = f"resp_{context.identity}"
        self._item = f"msg_{context.identity}" if call.tool is None else f"fc_{context.identity}"
        self._sequence = 0

    def opening(self) -> list[bytes]:
        start = self._response("in_progress", [], None)
        events = [self._event("response.created", response=start), self._event("response.in_progress", response=start)]
        if self._call.tool is not None:
            item = self._tool_item("", "in_progress")
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            return events
        item = {
            "id": self._item,
            "content": [],
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
            "phase": None,
        }
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        events.append(self._event("response.output_item.added", output_index=0, item=item))
        events.append(self._part("response.content_part.added", part=part))
        return events

    def delta(self, choice: Choice) -> list[bytes]:
        _, _, text = _new_pieces(choice)
        if self._call.tool is not None:
            name = "response.function_call_arguments.delta"
            return [self._event(name, item_id=self._item, output_index=0, delta=text)]
        return [self._part("response.output_text.delta", delta=text, logprobs=[])]

    def closing(self) -> list[bytes]:
        choice = self._call.choices[0]
        text = "".join(choice.answer.pieces[: choice.generated])
        events = []
        if self._call.tool is not None:
            name = "response.function_call_arguments.done"
            events.append(self._event(name, item_id=self._item, output_index=0, arguments=text, name=self._call.tool))
            item = self._tool_item(text, "completed")
        else:
            item = self._message_item(text)
            events.append(self._part("response.output_text.done", text=text, logprobs=[]))
            events.append(self._part("response.content_part.done", part=item["content"][0]))
        events.append(self._event("response.output_item.done", output_index=0, item=item))
        final = self._response(self._status(), [item], self._usage())
        # vLLM says so of an incomplete one too; its status tells them apart
        events.append(self._event("response.completed", response=final))
        return events

    def body(self) -> bytes:
        choice = self._call.choices[0]
        _, _, text = _new_pieces(choice)
        item = self._message_item(text) if self._call.tool is None else self._tool_item(text, "completed")
        return orjson.dumps(self._response(self._status(), [item], self._usage()))

    def _status(self) -> str:
        return "completed" if self._call.choices[0].finish is Finish.STOP else "incomplete"

    def _message_item(self, text: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "content": [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        }

    def _tool_item(self, arguments: str, status: str) -> dict[str, Any]:
        return {
            "arguments": arguments,
            "call_id": tool_identity(self._context),
            "name": self._call.tool,
            "type": "function_call",
            "id": self._item,
            "async": None,
            "caller": None,
            "namespace": None,
            "status": status,
        }

    def _usage(self) -> dict[str, Any]:
        call = self._call
        prompt, completion = call.prompt_tokens, call.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": self._context.cached(call),
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": completion,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + completion,
        }

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._call.body
        tools = body.get("tools") or []
        reason = None
        if status == "incomplete":
            aborted = self._call.choices[0].finish is Finish.ABORT
            reason = {"reason": "abort" if aborted else "max_output_tokens"}
        return {
            "id": self._id,
            "created_at": self._context.created,
            "incomplete_details": reason,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self._call.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if body.get("temperature") is None else float(body["temperature"]),
            "tool_choice": body.get("tool_choice") or ("auto" if tools else "none"),
            "tools": [_responses_tool(tool) for tool in tools],
            "top_p": 1.0 if body.get("top_p") is None else float(body["top_p"]),
            "background": False,
            "max_output_tokens": self._call.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": body.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _part(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._item, output_index=0, content_index=0, **fields)

    def _event(self, event: str, **fields: Any) -> bytes:
        # pydantic's order: a part's own fields by name, then what all events have; the text of a part comes last
        late = {key: fields.pop(key) for key in ("name", "text") if key in fields}
        text = {"text": late.pop("text")} if "text" in late else {}
        known = {**dict(sorted(fields.items())), "sequence_number": self._sequence, **text, "type": event}
        data = orjson.dumps({**known, **late})
        self._sequence += 1
        return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


def _responses_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the Responses API repeats it: every field that it knows, in its order."""
    if tool.get("type") != "function":
        return tool
    shown: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("parameters")}
    shown |= {"strict": tool.get("strict"), "type": "function"}
    for name in ("allowed_callers", "async", "defer_loading", "description", "output_schema"):
        shown[name] = tool.get(name)
    return shown


class MessagesReply:
    """/v1/messages, Anthropic's shape."""

    def __init__(self, call: Call, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._id = f"chatcmpl-{context.identity}"

    def opening(self) -> list[bytes]:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._call.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._call.prompt_tokens, "output_tokens": 0},
        }
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self._call.tool is not None:
            block = {"type": "tool_use", "id": tool_identity(self._context), "name": self._call.tool, "input": {}}
        return [
            self._event("message_start", message=message),
            self._event("content_block_start", content_block=block, index=0),
        ]

    def delta(self, choice: Choice) -> list[bytes]:
        _, _, text = _new_pieces(choice)
        delta = {"type": "text_delta", "text": text}
        if self._call.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return [self._event("content_block_delta", delta=delta, index=0)]

    def closing(self) -> list[bytes]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._call.choices[0].answer.stop}
        return [
            self._event("content_block_stop", index=0),
            self._event("message_delta", delta=delta, usage=self._usage()),
            self._event("message_stop"),
        ]

    def body(self) -> bytes:
        choice = self._call.choices[0]
        _, _, text = _new_pieces(choice)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if self._call.tool is not None:
            whole = choice.finish is Finish.STOP
            given = orjson.loads(text) if whole else {}
            name = self._call.tool
            content = [{"type": "tool_use", "id": tool_identity(self._context), "name": name, "input": given}]
        reply: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._call.model,
            "stop_reason": self._stop_reason(),
        }
        if choice.answer.stop is not None:
            reply["stop_sequence"] = choice.answer.stop
        reply["usage"] = self._usage()
        return orjson.dumps(reply)

    def _stop_reason(self) -> str:
        choice = self._call.choices[0]
        if choice.finish is Finish.STOP:
            if self._call.tool is not None:
                return "tool_use"
            return "end_turn" if choice.answer.stop is None else "stop_sequence"
        return "max_tokens" if choice.finish is Finish.LENGTH else "abort"

    def _usage(self) -> dict[str, Any]:
        call, context = self._call, self._context
        if not context.details:
            return {"input_tokens": call.prompt_tokens, "output_tokens": call.completion_tokens}
        cached, created = context.cached(call), call.created_cache_tokens(context.block_size)
        return {
            "input_tokens": max(0, call.prompt_tokens - cached - created),
            "output_tokens": call.completion_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }

    @staticmethod
    def _event(name: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": name, **fields})
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class RealtimeReply:
    """A transcription over /v1/realtime: its events are messages of a websocket."""

    def __init__(self, call: Call, context: ReplyContext) -> None:
        self._call = call

    def opening(self) -> list[bytes]:
        return []

    def delta(self, choice: Choice) -> list[bytes]:
        _, _, text = _new_pieces(choice)
        return [json_message({"type": "transcription.delta", "delta": text})]

    def closing(self) -> list[bytes]:
        call, choice = self._call, self._call.choices[0]
        prompt, completion = call.prompt_tokens, call.completion_tokens
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }
        text = "".join(choice.answer.pieces[: choice.generated])
        return [json_message({"type": "transcription.done", "text": text, "usage": usage})]

    def body(self) -> bytes:
        raise AssertionError("a transcription is always streamed")


class EmbeddingReply:
    """/v1/embeddings: vectors from the text's hash, all at once."""

    def __init__(self, call: Call, identity: str, created: int) -> None:
        self._call = call
        self._id = f"embd-{identity}"
        self._created = created

    def opening(self) -> list[bytes]:
        return []

    def delta(self, choice: Choice) -> list[bytes]:
        return []

    def closing(self) -> list[bytes]:
        return []

    def body(self) -> bytes:
        call = self._call
        as_text = call.body.get("encoding_format") == "base64"
        data = []
        for choice in call.choices:
            random = Random(choice.request.block_hashes[-1] if choice.request.block_hashes else choice.prompt.tobytes())
            vector = [round(random.uniform(-1.0, 1.0), 6) for _ in range(EMBEDDING_WIDTH)]
            packed = base64.b64encode(struct.pack(f"<{EMBEDDING_WIDTH}f", *vector)).decode()
            data.append({"index": choice.index, "object": "embedding", "embedding": packed if as_text else vector})
        usage = {
            "prompt_tokens": call.prompt_tokens,
            "total_tokens": call.prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        return orjson.dumps(
            {
                "id": self._id,
                "object": "list",
                "created": self._created,
                "model": call.model,
                "data": data,
                "usage": usage,
            }
        )
