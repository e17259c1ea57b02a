"""The chat template of the recorded engine (ChatML with tools in the system message), as segments for the tokenizer.

    <|im_start|>system\\n CONTENT [\\nTools:\\n TOOL ...] <|im_end|>\\n  <|im_start|>ROLE\\n CONTENT <|im_end|>\\n ...
    <|im_start|>assistant\\n

Anthropic's and the Responses API's bodies are brought into the shape of chat messages first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import xxhash

from router.sim.tokenizer import Segment, Special

IMAGE_TOKENS = 16  # a picture's placeholders, then its digest as text: equal pictures share blocks, others do not

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """Messages that the template cannot render; the text is for the client."""


def render(
    messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
) -> list[Segment]:
    """Segments of the whole prompt. TemplateError where vLLM refuses."""
    if not messages:
        raise TemplateError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    segments: list[Segment] = []
    first = messages[0]
    has_system = first.get("role") in ("system", "developer")
    if has_system or tools:
        segments += (Special.MESSAGE_START, b"system\n")
        if has_system:
            segments += _content(first.get("content"))
        if tools:
            segments.append(b"\nTools:\n")
            segments += (b"\n" + orjson.dumps(tool) for tool in tools)
        segments += (Special.MESSAGE_END, b"\n")
    for message in messages[1:] if has_system else messages:
        role = message.get("role")
        if not isinstance(role, str):
            raise TemplateError("A message has no role.")
        segments += (Special.MESSAGE_START, role.encode() + b"\n")
        segments += _content(message.get("content"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            segments += (Special.TOOL_CALL, orjson.dumps(function), Special.TOOL_CALL_END)
        segments += (Special.MESSAGE_END, b"\n")
    if add_generation_prompt:
        segments += (Special.MESSAGE_START, b"assistant\n")
    return segments


def _content(content: Any) -> Iterator[Segment]:
    if content is None:
        return
    if isinstance(content, str):
        yield content.encode("utf-8", "surrogatepass")
        return
    if not isinstance(content, list):
        raise TemplateError("A message's content is neither a string nor a list of parts.")
    # Text parts are joined by a newline and make one stretch, so that parts and the string they stand for are one.
    text: list[bytes] = []
    for part in content:
        if isinstance(part, str):
            text.append(part.encode("utf-8", "surrogatepass"))
            continue
        if not isinstance(part, Mapping):
            raise TemplateError("A content part is not an object.")
        kind = part.get("type")
        if isinstance(part.get("text"), str):
            text.append(part["text"].encode("utf-8", "surrogatepass"))
        elif isinstance(part.get("refusal"), str):
            text.append(part["refusal"].encode("utf-8", "surrogatepass"))
        elif isinstance(kind, str) and any(word in kind for word in ("image", "audio", "video", "file")):
            if text:
                yield b"\n".join(text)
                text = []
            reference = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
            yield from [Special.IMAGE] * IMAGE_TOKENS
            yield xxhash.xxh3_64_digest(reference)
        else:
            raise TemplateError(f"Unknown part type: {str(kind)[:64]}")
    if text:
        yield b"\n".join(text)


def from_anthropic(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools of a /v1/messages body."""
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        if not isinstance(message, Mapping):
            raise TemplateError("A message is not an object.")
        content = message.get("content")
        if not isinstance(content, list):
            messages.append({"role": message.get("role"), "content": content})
            continue
        parts: list[Any] = []
        calls: list[dict[str, Any]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "tool_use":
                arguments = orjson.dumps(part.get("input") or {}).decode()
                calls.append({"function": {"name": part.get("name"), "arguments": arguments}})
            elif kind == "tool_result":
                messages.append({"role": "tool", "content": part.get("content")})
            elif kind == "thinking":
                continue
            else:
                parts.append(part)
        if parts or calls:
            messages.append({"role": message.get("role"), "content": parts, "tool_calls": calls})
    tools = body.get("tools")
    if not tools:
        return messages, None
    return messages, [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in tools
        if isinstance(tool, Mapping)
    ]


def from_responses(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of a /v1/responses body."""
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    for item in given or ():
        if not isinstance(item, Mapping):
            raise TemplateError("An input item is not an object.")
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"function": {"name": item.get("name"), "arguments": item.get("arguments")}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
        elif kind == "reasoning":
            continue
        else:
            messages.append({"role": item.get("role"), "content": item.get("content")})
    return messages
