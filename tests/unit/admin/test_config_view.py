"""The configuration as it may be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from router.admin.config_view import SET, config_view
from router.config import Config, key_paths, parse

FREE = ("models.aliases", "models.tokenizers")


def flat(shown: dict[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in shown.items():
        path = prefix + key
        if isinstance(value, dict) and path not in FREE:
            found.update(flat(value, path + "."))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                found.update(flat(item, path + "."))
        else:
            found[path] = value
    return found


def test_every_key_of_the_file_is_shown_with_its_value() -> None:
    shown = flat(config_view(parse({"backends": [{"url": "http://a"}]})))
    for path, default in key_paths():
        expected: object = list(default) if isinstance(default, tuple) else default
        if path == "backends.url":
            expected = "http://a:80"
        if path == "backends.name":
            expected = "a:80"
        assert shown.pop(path) == expected, path
    secrets = {"admin.token", "auth.keys", "backends.api_key", "kv_cache.l2_password", "tracing.headers"}
    assert set(shown) == secrets
    assert set(shown.values()) == {None}


def test_it_is_json_and_reads_back_as_the_same_configuration() -> None:
    source = {
        "routing": {"strategy": "session", "session": {"cookie": "sid"}},
        "models": {"aliases": {"gpt-4o": "m"}},
        "backends": [{"url": "http://a", "models": ["m", "n"], "weight": 0.5}, {"url": "http://b"}],
        "limits": {"max_queue": 3},
    }
    config = parse(source)

    def given(table: Any) -> Any:
        if isinstance(table, dict):
            return {key: given(value) for key, value in table.items() if value is not None}
        return [given(item) for item in table] if isinstance(table, list) else table

    assert parse(given(json.loads(json.dumps(config_view(config))))) == config


def test_secrets_are_only_said_to_be_there_and_their_places_are_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("team:client-secret\n")
    environ = {"ADMIN": "admin-secret", "ENGINE": "engine-secret", "OTLP": "otlp-secret"}
    source = {
        "admin": {"token_env": "ADMIN"},
        "auth": {"api_keys_file": str(keys)},
        "tracing": {"headers_env": "OTLP"},
        "backends": [{"url": "http://a", "api_key_env": "ENGINE"}],
    }
    shown = config_view(parse(source, environ=environ))
    assert "-secret" not in json.dumps(shown)
    assert shown["admin"] == {"host": "127.0.0.1", "port": 9090, "token_env": "ADMIN", "token": SET}
    assert shown["auth"] == {"api_keys_file": str(keys), "keys": SET}
    assert (shown["tracing"]["headers_env"], shown["tracing"]["headers"]) == ("OTLP", SET)
    assert (shown["backends"][0]["api_key_env"], shown["backends"][0]["api_key"]) == ("ENGINE", SET)


def test_credentials_inside_of_urls_are_masked() -> None:
    """Built by hand: not every key that may hold one is read yet."""
    config = parse({"tracing": {"otlp_endpoint": "https://user:pa@ss@collector:4318/v1?key=secret"}})
    assert config_view(config)["tracing"]["otlp_endpoint"] == "https://***@collector:4318/v1?***"
    for table in ("redis", "kv_cache"):
        fields = {"redis": "url", "kv_cache": "l2"}[table]
        inner = type(getattr(config, table))(**{fields: "redis://:secret@cache:6379/0?password=secret"})
        shown = config_view(Config(**{table: inner}))
        assert shown[table][fields] == "redis://***@cache:6379/0?***"


def test_what_only_looks_like_a_url_is_left_alone() -> None:
    aliases = {"what?": "hf://me@models/llama?x"}
    assert config_view(parse({"models": {"aliases": aliases}}))["models"]["aliases"] == aliases
