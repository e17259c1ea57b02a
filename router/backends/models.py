"""What an engine may say in its answer to /v1/models. The answer is outside input: nothing in it is trusted."""

from __future__ import annotations

from typing import Any

import orjson

BODY_LIMIT_BYTES = 1024 * 1024
ENTRIES_LIMIT = 4096  # base names and LoRA adapters of one engine
NAME_LIMIT_CHARS = 512


class BadModels(ValueError):
    """The answer is not a list of models; the text says what was expected, and quotes nothing of the answer."""


def read_models(body: bytes) -> list[dict[str, Any]]:
    """The entries of `{"data": [{"id": ...}, ...]}`, each with all its fields, the first of those with one id.

    One bad entry makes the whole answer bad: an engine that we misread must not lose half of its models quietly.
    """
    if len(body) > BODY_LIMIT_BYTES:
        raise BadModels(f"longer than {BODY_LIMIT_BYTES} bytes")
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise BadModels("not JSON") from None
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        raise BadModels("no list under `data`")
    if len(data) > ENTRIES_LIMIT:
        raise BadModels(f"more than {ENTRIES_LIMIT} entries")
    entries: dict[str, dict[str, Any]] = {}
    for entry in data:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise BadModels("an entry without a string `id`")
        if len(name) > NAME_LIMIT_CHARS:
            raise BadModels(f"an `id` of more than {NAME_LIMIT_CHARS} characters")
        entries.setdefault(name, entry)
    try:
        orjson.dumps(data)  # it reads deeper nesting than it writes, and these go into our own listing
    except orjson.JSONEncodeError:
        raise BadModels("nested too deeply") from None
    return list(entries.values())
