"""What a path means for routing and for repeating. Every path is forwarded; this only sorts them."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class PathKind(Enum):
    INFERENCE = auto()  # has a model and a prompt; may be repeated until its first body byte went downstream
    READ = auto()  # asks and changes nothing; may be repeated likewise
    CHANGE = auto()  # changes an engine, or nobody knows: repeated only if it was never sent


MESSAGES_PATH: Final = b"/v1/messages"  # Anthropic's API; each event of its streams has a name

_INFERENCE = frozenset(
    path
    for base in (
        b"chat/completions",
        b"chat/completions/batch",
        b"chat/completions/render",
        b"completions",
        b"completions/render",
        b"embeddings",
        b"responses",
        b"responses/render",
        b"messages",
        b"messages/count_tokens",
        b"messages/render",
        b"rerank",
        b"score",
        b"audio/transcriptions",
        b"audio/translations",
        b"audio/speech",
        b"images/generations",
        b"images/edits",
        b"decisions",
        b"systemone",
    )
    for path in (b"/v1/" + base,)
) | {
    b"/v2/rerank",
    b"/v2/embed",
    b"/cohere/v2/chat",
    b"/rerank",
    b"/score",
    b"/pooling",
    b"/classify",
    b"/generative_scoring",
    b"/tokenize",
    b"/detokenize",
    b"/inference/v1/generate",
    b"/generate",
    b"/invocations",
}

_READING_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS"))


_INFERENCE_PATH: Final = PathKind.INFERENCE
_READ: Final = PathKind.READ
_CHANGE: Final = PathKind.CHANGE


# After these an engine serves other models than before.
ADAPTER_PATHS: Final = frozenset((b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"))


def path_kind(method: bytes, path: bytes) -> PathKind:
    if method == b"POST" and path in _INFERENCE:
        return _INFERENCE_PATH
    return _READ if method in _READING_METHODS else _CHANGE
