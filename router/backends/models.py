"""What an engine may say in its answer to /v1/models. The answer is outside input: nothing in it is trusted."""

from __future__ import annotations

from typing import Any

import orjson

BODY_LIMIT_BYTES = 1024 * 1024
ENTRIES_LIMIT = 4096  # base names and LoRA adapters of one engine
NAME_LIMIT_CHARS = 512


class BadModels(ValueError):
    """The answer is not a list of models; the text says what was expected, and quotes nothing of the answer."""


def read_models(body: bytes, faults: list[str] | None = None) -> list[dict[str, Any]]:
    """The entries of `{"data": [{"id": ...}, ...]}`, each with all its fields, the first of those with one id.

    An entry that cannot be used is left out, so that it costs the engine no other model, and told in `faults`, once for
    each kind; where none can be used, the answer is BadModels. What is returned can be written as JSON again, also as
    part of our own listing.
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
    found: dict[str, int] = {}
    for entry in data:
        fault = _fault_of(entry)
        if fault:
            found[fault] = found.get(fault, 0) + 1
        else:
            entries.setdefault(entry["id"], entry)
    if found and not entries:
        raise BadModels(next(iter(found)))
    if faults is not None:
        faults.extend(f"{fault} ({count} of {len(data)} left out)" for fault, count in found.items())
    return list(entries.values())


def _fault_of(entry: object) -> str:
    name = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        return "an entry without a string `id`"
    if len(name) > NAME_LIMIT_CHARS:
        return f"an `id` of more than {NAME_LIMIT_CHARS} characters"
    try:
        orjson.dumps({"data": [entry]})  # it reads deeper nesting than it writes, and this is the depth of our listing
    except orjson.JSONEncodeError:
        return "an entry nested too deeply"
    return ""
