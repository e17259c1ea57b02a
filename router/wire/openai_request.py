"""A request's body as routing sees it: a peek, never a full parse, and the body itself is not changed.

JSON is read by native/body_scan.pyx, which also describes the routing prefix; forms here. A form's routing prefix is,
for each part but `model`, in order: 0x16, the lengths of name and value (4 and 8 bytes, little endian) and both; for a
file, and for a text of over 64 KiB, 0x17, the length of the name, the name, and the 8 bytes xxh64 of the value. Its
seed is xxh64(path, xxh64(model, 0)): a transcription and a translation of one file are different prompts. Other seeds
for a model are given as for JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import orjson

from native.block_hash import BlockHashes, xxh64_digest
from native.body_scan import MALFORMED, OK, scan_json
from router.wire.multipart import MultipartError, Part, boundary_of, is_multipart, read_parts

TEXT_LIMIT_BYTES: Final = 65536
VALUE_LIMIT_BYTES: Final = 4096  # a longer form field is no model's name and no session's key; as native/body_scan.pyx


@dataclass(slots=True)
class RequestBody:
    """What a body says. `readable`: its prompt has a shape that we know, and `blocks` tell it where they were asked
    for; otherwise load places it. `malformed`: it is not what its content type says.

    `model_span` locates the model in the body: its JSON string with the quotation marks, or in a form (`is_form`) its
    value; see with_model(). `prefix_bytes` is the length of the routing prefix with
    its unhashed tail; `prompt_tokens` is exact, for prompts of token ids; `session_values` go with `session_fields`.
    """

    model: str | None = None
    stream: bool = False
    readable: bool = False
    malformed: bool = False
    blocks: BlockHashes | None = None
    prefix_bytes: int = 0
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    session_values: tuple[bytes | None, ...] = ()
    model_span: tuple[int, int] | None = None
    is_form: bool = False


def read_request(
    content_type: bytes,
    path: bytes,
    body: bytes,
    block_bytes: int,
    session_fields: tuple[str, ...],
    need_prefix: bool,
    seeds: dict[str, bytes] | None = None,
    default_seed: bytes = b"",
) -> RequestBody:
    """Read a body. No bytes of a client make it raise; ValueError for a `block_bytes` or `session_fields` that
    scan_json refuses.

    A body without a content type is taken for JSON, as engines do; one of another type is neither readable nor
    malformed. `blocks` is None unless `need_prefix`. Costs 1 us and the scan.
    """
    if not body:
        return RequestBody(session_values=(None,) * len(session_fields))
    if content_type == b"application/json" or _is_json(content_type):
        scanned = scan_json(body, block_bytes, _encoded(session_fields), need_prefix, seeds, default_seed)
        return RequestBody(
            scanned.model,
            scanned.stream,
            scanned.status == OK,
            scanned.status == MALFORMED,
            scanned.blocks,
            scanned.prefix_bytes,
            scanned.prompt_tokens,
            scanned.max_tokens,
            scanned.values,
            scanned.model_span,
        )
    if is_multipart(content_type):
        try:
            parts = read_parts(body, boundary_of(content_type))
        except MultipartError:
            return RequestBody(malformed=True, session_values=(None,) * len(session_fields))
        return _read_form(parts, path, block_bytes, _encoded(session_fields), need_prefix, seeds, default_seed)
    return RequestBody(session_values=(None,) * len(session_fields))


def with_model(body: bytes, seen: RequestBody, model: str) -> bytes:
    """`body` with this name in the place of the model's, every other byte as it was. `seen` is what read_request() made
    of it, and found a model. Where a JSON body has the key twice, the last one is replaced: the one that engines read.

    A name holds no control character (config.py), so it cannot end a form's part.
    """
    assert seen.model_span is not None
    start, end = seen.model_span
    return b"".join((body[:start], model.encode() if seen.is_form else orjson.dumps(model), body[end:]))


def _is_json(content_type: bytes) -> bool:
    media_type = content_type.split(b";", 1)[0].strip().lower()
    return media_type in (b"", b"application/json") or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    )


@lru_cache(maxsize=16)
def _encoded(fields: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(field.encode() for field in fields)


def _read_form(
    parts: list[Part],
    path: bytes,
    block_bytes: int,
    session_fields: tuple[bytes, ...],
    need_prefix: bool,
    seeds: dict[str, bytes] | None,
    default_seed: bytes,
) -> RequestBody:
    prefix = bytearray()
    texts: dict[bytes, bytes] = {}
    model_span: tuple[int, int] | None = None
    for part in parts:
        fits = not part.is_file and len(part.value) <= VALUE_LIMIT_BYTES
        if fits:
            texts[part.name] = bytes(part.value)  # the last one wins, as in the engines' form reader
        if part.name == b"model":
            if fits:
                model_span = (part.start, part.start + len(part.value))
            continue
        name_length = len(part.name).to_bytes(4, "little")
        if part.is_file or len(part.value) > TEXT_LIMIT_BYTES:
            digest = xxh64_digest(part.value) if need_prefix else 0
            prefix += b"\x17" + name_length + part.name + digest.to_bytes(8, "little")
        else:
            prefix += b"\x16" + name_length + len(part.value).to_bytes(8, "little") + part.name + part.value
    encoded = texts.get(b"model")
    model = None if encoded is None else encoded.decode(errors="replace")
    blocks = None
    if need_prefix:
        seeding = default_seed if encoded is None else encoded
        if seeds is not None and model is not None:
            seeding = seeds.get(model, seeding)
        seed = xxh64_digest(path.split(b"?", 1)[0], xxh64_digest(seeding))
        blocks = BlockHashes.from_bytes(bytes(prefix), block_bytes, seed)
    return RequestBody(
        model=model,
        stream=texts.get(b"stream", b"").strip().lower() in (b"true", b"1"),
        readable=True,
        blocks=blocks,
        prefix_bytes=len(prefix),
        session_values=tuple(texts.get(field) for field in session_fields),
        model_span=model_span,
        is_form=True,
    )
