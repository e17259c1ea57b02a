"""A request's body in the form in which an engine hands it to its chat template or tokenizer.

The rules are those of vLLM's chat parsing (read in 0.32; facts that differ between releases are refused, not guessed):
text parts are joined by line ends or kept as parts, whichever the template wants; tool-call arguments become objects;
tools are brought into the schema's order. What an engine would refuse is refused here as well: it never gets cached.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from router.tokens.answers import Refused, Why

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
MAX_TOKEN_ID: Final = 2**32 - 1
MAX_MESSAGES: Final = 20_000

_TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Fields of other kinds of parts: in a text part they would make it one, or be dropped.
_MEDIA_KEYS: Final = frozenset(
    {"image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds", "video_url", "video_embeds"}
    | {"prompt_embeds", "data", "file", "tool_reference", "name", "detail", "closed"}
    | {"text", "refusal", "thinking"}
)
_ROLES_WITH_CONTENT: Final = frozenset({"system", "developer", "user", "tool"})
_BILLING_HEADER: Final = "x-anthropic-billing-header"  # newer engines cut such a line out of system messages
# Arguments of the rendering itself: as template arguments they would mean something else.
_RESERVED_ARGUMENTS: Final = frozenset(
    {"chat_template", "tokenize", "tools", "documents", "conversation", "messages", "return_assistant_tokens_mask"}
)
_TOOL_KEYS: Final = ("name", "description", "parameters")
_OPTIONAL_TOOL_KEYS: Final = ("strict", "defer_loading")


@dataclass(frozen=True, slots=True)
class GivenIds:
    ids: array[int]
    salt: str | None = None  # the request's cache_salt


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`messages` as the client sent them, but that `reasoning_content` is there as `reasoning` too: engines' /tokenize
    knows the old name or the new one. `arguments` are the template's, `tools` in the engine's order. conversation() is
    what the template gets."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    salt: str | None = None

    def conversation(self, *, parts: bool) -> list[dict[str, Any]]:
        """The template's messages; `parts`: it iterates over content parts, otherwise it prints strings."""
        return [_message(message, parts) for message in self.messages]


Prompt = GivenIds | TextPrompt | ChatPrompt


def prompt_chars(prompt: ChatPrompt) -> int:
    """How long all that a template gets is, about; what cannot be measured is long."""
    try:
        return len(orjson.dumps([prompt.messages, prompt.tools, prompt.arguments]))
    except orjson.JSONEncodeError:  # nested more deeply than it writes
        return MAX_TOKEN_ID


def read_prompt(path: str, body: bytes) -> Prompt:
    """What this request's engine will tokenize. Refused where that is not certain."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Refused(Why.SHAPE, "the body is not JSON") from None
    if not isinstance(request, dict):
        raise Refused(Why.SHAPE, "the body is not an object")
    path = path.partition("?")[0]
    if path == "/invocations":
        path = CHAT_PATH if "messages" in request else COMPLETIONS_PATH
    if path not in (CHAT_PATH, COMPLETIONS_PATH):
        raise Refused(Why.PATH, "only chats and completions are tokenized")
    if request.get("truncate_prompt_tokens") is not None:
        raise Refused(Why.UNCERTAIN, "truncate_prompt_tokens cuts the prompt in the engine")
    return _chat(request) if path == CHAT_PATH else _completion(request)


# -- completions


def _completion(request: dict[str, Any]) -> GivenIds | TextPrompt:
    if request.get("prompt_embeds") is not None:
        raise Refused(Why.MEDIA, "a prompt of embeddings")
    if request.get("suffix"):
        raise Refused(Why.UNCERTAIN, "a suffix is rendered by the engine")
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # the prompts of one request run side by side: the first one places it
    if isinstance(prompt, str):
        return TextPrompt(prompt, _flag(request, "add_special_tokens", True), _salt(request))
    if isinstance(prompt, list) and prompt:
        return GivenIds(_ids(prompt), _salt(request))
    raise Refused(Why.SHAPE, "no prompt that engines accept")


def _ids(values: list[Any]) -> array[int]:
    if not all(type(value) is int for value in values):  # a bool is an int, and array() would take it
        raise Refused(Why.SHAPE, "a prompt of token ids holds something else")
    try:
        return array("I", values)
    except OverflowError:
        raise Refused(Why.SHAPE, "a token id out of range") from None


# -- chats


def _chat(request: dict[str, Any]) -> ChatPrompt:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(Why.SHAPE, "no messages")
    if len(messages) > MAX_MESSAGES:
        raise Refused(Why.TOO_BIG, f"more than {MAX_MESSAGES} messages")
    if request.get("chat_template") is not None:
        raise Refused(Why.UNCERTAIN, "the request brings its own chat template")
    add_generation_prompt = _flag(request, "add_generation_prompt", True)
    continue_final_message = _flag(request, "continue_final_message", False)
    if continue_final_message and add_generation_prompt:  # its default counts too
        raise Refused(Why.SHAPE, "continue_final_message beside add_generation_prompt")
    return ChatPrompt(
        messages=[_checked_message(message) for message in messages],
        tools=_tools(request.get("tools")),
        arguments=_arguments(request),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=_flag(request, "add_special_tokens", False),
        salt=_salt(request),
    )


def _salt(request: dict[str, Any]) -> str | None:
    """What keeps its blocks apart from those of the same tokens; engines refuse an empty one."""
    salt = request.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise Refused(Why.SHAPE, "a cache_salt that is no text")
    return salt


def _flag(request: dict[str, Any], name: str, default: bool) -> bool:
    value = request.get(name, default)
    if not isinstance(value, bool):
        raise Refused(Why.SHAPE, f"{name} is not a boolean")
    return value


def _arguments(request: dict[str, Any]) -> dict[str, Any]:
    given = request.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise Refused(Why.SHAPE, "chat_template_kwargs is not an object")
    if not _RESERVED_ARGUMENTS.isdisjoint(given):
        raise Refused(Why.UNCERTAIN, "chat_template_kwargs holds an argument of the rendering itself")
    arguments = dict(given)
    documents, effort = request.get("documents"), request.get("reasoning_effort")
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            raise Refused(Why.SHAPE, "documents is not a list of objects")
        arguments["documents"] = documents
    if effort is not None:
        if not isinstance(effort, str):
            raise Refused(Why.SHAPE, "reasoning_effort is not a string")
        arguments["reasoning_effort"] = effort
        arguments.setdefault("enable_thinking", effort != "none")
    return arguments


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise Refused(Why.SHAPE, "tools is not a list of tools")
    ordered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(Why.SHAPE, "a tool without a named function")
        if tool.get("type", "function") != "function":
            raise Refused(Why.UNCERTAIN, "a tool that is no function")
        entry = {key: function.get(key) for key in _TOOL_KEYS}
        entry |= {key: function[key] for key in _OPTIONAL_TOOL_KEYS if function.get(key) is not None}
        if tool.get("defer_loading") is not None:
            raise Refused(Why.UNCERTAIN, "a tool that is loaded later")
        ordered.append({"type": "function", "function": entry})
    return ordered


def _checked_message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(Why.SHAPE, "a message without a role")
    if message.get("reasoning") is None and message.get("reasoning_content") is not None:
        message = {**message, "reasoning": message["reasoning_content"]}
    role, content = message["role"], message.get("content")
    if content is None and role in _ROLES_WITH_CONTENT:
        raise Refused(Why.SHAPE, "a message without content")
    if content is not None and not isinstance(content, str | list):
        raise Refused(Why.SHAPE, "a content that is neither text nor parts")
    if role == "developer" and message.get("tools") is not None:
        raise Refused(Why.UNCERTAIN, "tools in a developer message")
    if not isinstance(message.get("reasoning"), str | None):
        raise Refused(Why.SHAPE, "a reasoning that is no text")
    for text in _texts(content):
        if role == "system" and text.startswith(_BILLING_HEADER):
            raise Refused(Why.UNCERTAIN, "a line that newer engines cut out")
    if role == "assistant" and message.get("tool_calls") is not None:
        _tool_calls(message["tool_calls"])
    return message


def _texts(content: str | list[Any] | None) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Refused(Why.SHAPE, "a content part that is neither text nor an object")
        kind = part.get("type")
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None or part.get("uuid") is not None:
            raise Refused(Why.MEDIA, "a content part that is not text")
        if not _MEDIA_KEYS.isdisjoint(part.keys() - {key}):
            raise Refused(Why.UNCERTAIN, "a text part with fields of another kind")
        text = part.get(key)
        if text is None and kind in ("text", "refusal"):
            continue  # as engines do
        if not isinstance(text, str):
            raise Refused(Why.SHAPE, "a text part without text")
        texts.append(text)
    return texts


def _parts(content: str | list[Any] | None) -> list[dict[str, Any]]:
    """For a template that goes through them; what a client added to a part stays with it."""
    rendered = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            rendered.append({"type": "text", "text": part})
        elif part is not None and (text := part.get(_TEXT_PARTS[part["type"]])) is not None:
            added = {key: value for key, value in part.items() if key not in ("type", *_MEDIA_KEYS)}
            rendered.append({"type": "text", "text": text, **added})
    return rendered


def _message(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    role = message["role"]
    texts = _texts(message.get("content"))
    rendered: dict[str, Any] = {"role": role}
    if parts and role != "tool":
        rendered["content"] = _parts(message.get("content"))
    else:
        # A tool's answer is always printed as one string; empty parts leave no line.
        rendered["content"] = "\n".join(text for text in texts if text)
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            rendered["tool_calls"] = _tool_calls(calls)
        if message.get("reasoning") is not None:
            rendered["reasoning"] = rendered["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            rendered[key] = message[key]
    if role == "developer":
        rendered["tools"] = None
    return rendered


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    """In the order of the schema, which is the order that a template prints; arguments as an object."""
    if not isinstance(calls, list):
        raise Refused(Why.SHAPE, "tool_calls is not a list")
    ordered: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise Refused(Why.UNCERTAIN, "a tool call that calls no function")
        if not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str):
            raise Refused(Why.UNCERTAIN, "a tool call without a name or an id")
        given = function.get("arguments")
        if not isinstance(given, str):
            raise Refused(Why.UNCERTAIN, "tool-call arguments that are not a string")
        arguments: Any = {}
        if given:
            try:
                arguments = json.loads(given)  # as engines read it: big integers and NaN too
            except (ValueError, RecursionError):
                raise Refused(Why.UNCERTAIN, "tool-call arguments that are not JSON") from None
            if not isinstance(arguments, dict):
                raise Refused(Why.UNCERTAIN, "tool-call arguments that are no object")
        entry: dict[str, Any] = {"id": call["id"], "function": {"arguments": arguments, "name": function["name"]}}
        if "type" in call:
            entry["type"] = "function"
        entry["function"] |= {key: value for key, value in function.items() if key not in entry["function"]}
        entry |= {key: value for key, value in call.items() if key not in entry}  # such as the index of a streamed one
        ordered.append(entry)
    return ordered
