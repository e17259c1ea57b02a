"""What stands around a chunk's hash in LMCache's keys (0.5), read from the keys that a store holds.

In-process: model@world_size@worker@hash@dtype, layerwise with @layer; the connector for redis:// stores two keys for
each, with `metadata` and `kv_bytes` appended, others one. Multi-process: model@rank@group@hash[@salt], perhaps behind a
namespace and @. All keys are untrusted: anybody may have written them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

KEY_LIMIT_BYTES: Final = 1024
METADATA, VALUE = "metadata", "kv_bytes"
DTYPES: Final = "half|bfloat16|float|double|u?int8|int16|int32|int64|bool|fp8_e4m3fnuz|fp8_e4m3fn|fp8_e5m2fnuz|fp8_e5m2"
_MODEL: Final = r"[^@\x00-\x1f\x7f]{1,512}"
_IN_PROCESS: Final = re.compile(
    rf"({_MODEL})@([1-9][0-9]{{0,3}})@([0-9]{{1,4}})@-?[0-9a-f]{{1,16}}@({DTYPES})(@[0-9]{{1,4}})?"
    rf"((?:@[^@%]{{1,128}}%[^@]{{0,256}}?)*)({METADATA}|{VALUE})?"
)
_MULTI_PROCESS: Final = re.compile(
    rf"({_MODEL}@)??({_MODEL})@([0-9a-f]{{8}})@([0-9a-f]{{1,4}})@([0-9a-f]{{16,128}})(@[^@/\\\x00]{{1,128}})?"
)
_SALT: Final = re.compile(r"[^@/\\\x00]{1,128}")


class Form(StrEnum):
    IN_PROCESS = "in-process"
    MULTI_PROCESS = "multi-process"


class Unread(Enum):
    """A key that no layout is learned from."""

    TAGGED = "tagged"  # LMCache's, with tags of its request: which ones the next request has is not ours to know
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Layout:
    """A key is head + hash + tail. Several workers of an engine share one: the first one's key stands for all."""

    form: Form
    model: str
    head: bytes
    tail: bytes

    def key(self, chunk_hex: bytes, salt: bytes) -> bytes:
        """`salt` as `salt_suffix` gives it."""
        return b"%b%b%b%b" % (self.head, chunk_hex, self.tail, salt)


def read_key(key: bytes) -> Layout | Unread:
    if len(key) > KEY_LIMIT_BYTES:
        return Unread.OTHER
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return Unread.OTHER
    if matched := _IN_PROCESS.fullmatch(text):
        model, world_size, worker, dtype, layer, tags, suffix = matched.groups()
        if int(worker) >= int(world_size):
            return Unread.OTHER
        if tags:
            return Unread.TAGGED
        tail = f"@{dtype}{'@0' if layer else ''}{METADATA if suffix else ''}"
        return Layout(Form.IN_PROCESS, model, f"{model}@{world_size}@0@".encode(), tail.encode())
    if matched := _MULTI_PROCESS.fullmatch(text):
        namespace, model, rank, group, _hash, _salt = matched.groups()
        first = int(rank, 16) & 0xFF00FF00  # world size, rank, local world size, local rank: a byte each
        head = f"{namespace or ''}{model}@{first:08x}@{group}@"
        return Layout(Form.MULTI_PROCESS, model, head.encode(), b"")
    return Unread.OTHER


def salt_suffix(salt: str | None) -> bytes | None:
    """What a request's cache_salt adds to a key of the multi-process form; None: LMCache has no key for that."""
    if not salt:
        return b""
    return b"@" + salt.encode("utf-8", "surrogatepass") if _SALT.fullmatch(salt) else None
