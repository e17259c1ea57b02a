"""Configurations of the documentation, made fit for this machine and for a test that has little time."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.certificates import make_certificates
from tests.support.gateway_process import toml

_PARTS = {"tls_cert": "cert", "tls_key": "key", "tls_ca": "ca"}


def localized(text: str, addresses: Mapping[str, str], folder: Path) -> str:
    """The file with our addresses, free ports and quick checks, and with files of our own in `folder` in place of those
    that it names by an absolute path."""
    for shown, real in addresses.items():
        text = text.replace(shown, real)
    config = tomllib.loads(text)
    config.setdefault("server", {})["port"] = 0
    config.setdefault("admin", {})["port"] = 0
    config.setdefault("health", {}).setdefault("interval_s", 0.2)
    config["health"].setdefault("healthy_after", 1)
    config.setdefault("timeouts", {}).setdefault("lame_duck_s", 0.0)
    for table in _tables(config):
        for key, value in table.items():
            if key in _PARTS and value.startswith("/"):
                table[key] = str(getattr(make_certificates(folder / key), _PARTS[key]))
            elif key == "api_keys_file" and value.startswith("/"):
                (folder / "example-keys").write_text("alice:a-key-of-the-example\n")
                table[key] = str(folder / "example-keys")
    # A certificate and its key are of one pair.
    server = config["server"]
    if server.get("tls_cert", "").startswith(str(folder)):
        made = make_certificates(folder / "server")
        server.update(tls_cert=str(made.cert), tls_key=str(made.key))
    return toml(config)


def environment_names(text: str) -> set[str]:
    """The variables that a file names."""
    return {value for table in _tables(tomllib.loads(text)) for key, value in table.items() if key.endswith("_env")}


def _tables(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield table
    for value in table.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from _tables(inner)
