"""GET /config: the configuration in force, in the shape of the file, without its secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from router.config import Config

SET: Final = "(set)"
_CREDENTIALS = re.compile(r"(?<=://)[^/]*@")
_QUERY = re.compile(r"\?.*", re.DOTALL)


def config_view(config: Config) -> dict[str, Any]:
    """Keys that are absent are null. Secrets that variables or files hold show as "(set)", beside the name of what
    holds them; of URLs, the parts that may hold one are masked."""
    return _table(config)


def _table(table: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for spec in fields(table):
        value = getattr(table, spec.name)
        rule = spec.metadata.get("rule")
        if is_dataclass(value):
            shown[spec.name] = _table(value)
        elif "tables" in spec.metadata:
            shown[spec.name] = [_table(inner) for inner in value]
        elif rule is None:  # not a key of the file: what a variable or a file holds
            shown[spec.name] = None if value is None else SET
        else:
            shown[spec.name] = _value(value, may_hold_secret="://" in rule.expected)
    return shown


def _value(value: Any, *, may_hold_secret: bool) -> Any:
    if isinstance(value, str):
        return _QUERY.sub("?***", _CREDENTIALS.sub("***@", value)) if may_hold_secret else value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value
