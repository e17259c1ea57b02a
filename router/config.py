"""The configuration: one frozen dataclass per table of the file, read once, every fault named at once.

A table's class is its documentation and its parser: each field carries the rule that a value of the file must meet.
`config.example.toml` lists the same keys for people; tests/rules/test_example_config.py keeps the two together.

Secrets come through environment variables (`*_env`) only. They are read here, at load, and nowhere later; no fault
and no repr ever shows one, nor a value that may be one by mistake.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router import tls

STRATEGIES: Final = ("prefixaware", "kvaware", "session", "roundrobin", "leastload")

FILE_LIMIT_BYTES: Final = 1024 * 1024
BACKENDS_LIMIT: Final = 4096


# --- what is built later ---------------------------------------------------------------------------------------------

NOT_BUILT: Final[Mapping[str, Callable[[Any], bool]]] = {
    # key path without indexes -> whether the value is one that already works. Remove a line when its feature is built.
    "server.workers": lambda value: value == 1,
    "redis.url": lambda value: value is None,
}


# --- faults ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: where (a key path, a flag or a file), the value as it may be shown, what was expected."""

    key_path: str
    value: str
    expected: str

    def __str__(self) -> str:
        return f"{self.key_path}: {self.value} (expected {self.expected})"


class ConfigError(Exception):
    """All faults of one configuration, in the order of the tables. str() is one line per fault."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class _Unexpected(ValueError):
    """A refusal that says more than its rule's own `expected`; `at` and `value` point into an array or a table."""

    def __init__(self, expected: str, *, at: str = "", value: object = MISSING) -> None:
        super().__init__(expected)
        self.expected = expected
        self.at = at
        self.value = value


def _shown(value: object) -> str:
    """A value on one line, short, escaped, without the parts of a URL that may hold a secret: before @ and after ?."""
    if isinstance(value, str):
        hidden = re.sub(r"^(\w+://)?.*@", r"\1***@", value, flags=re.DOTALL)
        hidden = re.sub(r"\?.*", "?***", hidden, flags=re.DOTALL)
        return json.dumps(hidden if len(hidden) <= 100 else hidden[:100] + "...")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 1e18 or isinstance(value, float) else "a number too large"
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, Mapping):
        return "a table"
    return "a date or time"


# --- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """`read` turns the file's value into the field's, and raises ValueError where it is not what was expected."""

    expected: str
    read: Callable[[Any], Any]
    show: Callable[[object], str] = _shown


def _flag() -> _Rule:
    def read(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return _Rule("true or false", read)


def _integer(low: int, high: int, unit: str = "") -> _Rule:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError
        return value

    return _Rule(f"a whole number{unit and ' of ' + unit}, {low} to {high}", read)


def _number(low: float, high: float, unit: str = "") -> _Rule:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        # Compared before it is converted, as float() of a huge integer overflows; infinity and NaN fail this too.
        if not low <= value <= high:
            raise ValueError
        return float(value)

    return _Rule(f"a number{unit and ' of ' + unit}, {low:g} to {high:g}", read)


def _seconds(high: float = 86_400.0) -> _Rule:
    return _number(0.001, high, "seconds")


def _one_of(*names: str) -> _Rule:
    def read(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return _Rule(("one of " if len(names) > 1 else "") + ", ".join(names), read)


def _text(pattern: str, expected: str) -> _Rule:
    compiled = re.compile(pattern)

    def read(value: object) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError
        return value

    return _Rule(expected, read)


def _array(element: _Rule, expected: str, *, most: int, least: int = 0) -> _Rule:
    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise ValueError
        return tuple(_read_element(element, item, f"[{number}]") for number, item in enumerate(value))

    return _Rule(expected, read)


def _text_table(key: _Rule, entry: _Rule, expected: str, *, most: int) -> _Rule:
    def read(value: object) -> dict[str, str]:
        if not isinstance(value, Mapping) or len(value) > most:
            raise ValueError
        return {
            _read_element(key, name, "." + _join("", name)): _read_element(entry, item, "." + _join("", name))
            for name, item in value.items()
        }

    return _Rule(expected, read)


def _read_element(rule: _Rule, value: object, at: str) -> Any:
    try:
        return rule.read(value)
    except ValueError:
        raise _Unexpected(rule.expected, at=at, value=value) from None


_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOSTNAME: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?")


def _is_host(text: str) -> bool:
    """An IPv4 or IPv6 address (no brackets, no zone) or a hostname, underscores allowed as Compose uses them."""
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return False
        return "%" not in text
    return _HOSTNAME.fullmatch(text) is not None


def _listen_host() -> _Rule:
    def read(value: object) -> str:
        if not isinstance(value, str) or not _is_host(value):
            raise ValueError
        return value

    return _Rule('an address or a hostname, such as "0.0.0.0", "::" or "localhost"', read)


_BACKEND_URL: Final = "http://host:port or https://host:port, without path, query and credentials"


def _backend_url() -> _Rule:
    """To scheme://host:port with the port always written; the default port is the scheme's."""

    def read(value: object) -> str:
        # Checked first, as urlsplit drops tabs and newlines without a word.
        if not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,400}", value):
            raise ValueError
        if not re.match(r"https?://", value, re.IGNORECASE):
            raise _Unexpected(f"a scheme: {_BACKEND_URL}")
        parts = urlsplit(value)
        port = parts.port
        if parts.username is not None or parts.password is not None:
            raise _Unexpected("no credentials: a key goes through api_key_env")
        if parts.path not in ("", "/") or "?" in value or "#" in value:
            raise _Unexpected("no path, query or fragment: http://host:port")
        if parts.hostname is None or not _is_host(parts.hostname) or port == 0:
            raise ValueError
        if port is None:
            port = 443 if parts.scheme == "https" else 80
        return f"{parts.scheme}://{_host_port(parts.hostname, port)}"

    return _Rule(_BACKEND_URL, read)


_STORE_URL: Final = "redis://host:port/0, or rediss:// for TLS; a user may stand before an @, a password may not"


def _store_url() -> _Rule:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"rediss?://[!-~]{1,400}", value):
            raise ValueError
        parts = urlsplit(value)
        if parts.password is not None:
            raise _Unexpected("no password: it goes through l2_password_env")
        if not re.fullmatch(r"(/[0-9]{0,5})?", parts.path) or "?" in value or "#" in value:
            raise ValueError
        if parts.hostname is None or not _is_host(parts.hostname) or parts.port == 0:
            raise ValueError
        return value

    return _Rule(_STORE_URL, read)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _kv_events() -> _Rule:
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        if value in ("auto", "off"):
            return value
        matched = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([^:/\[\]]+)):([0-9]{1,5})", value)
        if not matched or not _is_host(matched[1] or matched[2]) or not 0 < int(matched[3]) < 65536:
            raise ValueError
        return value

    return _Rule('"auto", "off" or "tcp://host:port"', read)


def _environment_name() -> _Rule:
    def show(value: object) -> str:
        # Anything else may be the secret itself, put here by mistake.
        return _shown(value) if isinstance(value, str) and re.fullmatch(r"[A-Z_][A-Z0-9_]*", value) else "(hidden)"

    rule = _text(r"[A-Za-z_][A-Za-z0-9_]{0,255}", "the name of an environment variable")
    return _Rule(rule.expected, rule.read, show)


def _path() -> _Rule:
    return _text(r"[^\0]{1,4096}", "a path")


def _url(*schemes: str) -> _Rule:
    return _text(rf"(?:{'|'.join(schemes)})://[!-~]{{1,400}}", " or ".join(f"{scheme}://..." for scheme in schemes))


_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}"  # RFC 9110: what a header or a cookie may be called
_MODEL: Final = _text(r"[^\x00-\x1f\x7f]{1,512}", "a model's name, 1 to 512 characters")


def _header_names() -> _Rule:
    names = _array(_text(_TOKEN, "the name of a header"), "an array of header names, at most 16", most=16)
    return _Rule(names.expected, lambda value: tuple(name.lower() for name in names.read(value)))


# --- tables ----------------------------------------------------------------------------------------------------------


def _key(default: Any, rule: _Rule) -> Any:
    """A field that is a key of the file. A default of None: absent, and it means something only where it is given."""
    return field(default=default, metadata={"rule": rule})


def _mapping_key(rule: _Rule) -> Any:
    return field(default_factory=dict, metadata={"rule": rule})


def _required(rule: _Rule) -> Any:
    return field(metadata={"rule": rule})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`[server]`: the data port."""

    host: str = _key("127.0.0.1", _listen_host())
    port: int = _key(8080, _integer(0, 65535))
    workers: int = _key(1, _integer(1, 256))
    metrics: bool = _key(True, _flag())
    tls_cert: str | None = _key(None, _path())
    tls_key: str | None = _key(None, _path())


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """`[admin]`: health, metrics and backend control on a listener of their own."""

    host: str = _key("127.0.0.1", _listen_host())
    port: int = _key(9090, _integer(0, 65535))
    token_env: str | None = _key(None, _environment_name())
    token: str | None = field(default=None, repr=False)  # not a key: the value of the variable that token_env names


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """`[routing.session]`: where a request's session key is looked for, in this order. Header names in lower case."""

    headers: tuple[str, ...] = _key(("x-session-id", "x-user-id"), _header_names())
    body_fields: tuple[str, ...] = _key(
        ("session_id", "user", "prompt_cache_key"),
        _array(
            _text(r"[^\x00-\x1f\x7f]{1,128}", "the name of a field, 1 to 128 characters"),
            "an array of names of body fields, at most 16",
            most=16,
        ),
    )
    cookie: str = _key("", _text(f"(?:{_TOKEN})?", 'the name of a cookie, or ""'))


@dataclass(frozen=True, slots=True)
class KvAwareConfig:
    """`[routing.kvaware]`."""

    tokenization: str = _key("auto", _one_of("auto", "local", "engine", "off"))
    tokenizer: str | None = _key(None, _path())
    token_wait_share: float = _key(0.25, _number(0.0, 1.0))
    relearn: bool = _key(False, _flag())


@dataclass(frozen=True, slots=True)
class LineConfig:
    """`[routing.line]`: the held line."""

    hold: str = _key("auto", _one_of("auto", "on", "off"))
    batch_tokens: int = _key(0, _integer(0, 10**9, "tokens"))


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """`[routing]`."""

    strategy: str = _key("prefixaware", _one_of(*STRATEGIES))
    session: SessionConfig = field(default_factory=SessionConfig)
    kvaware: KvAwareConfig = field(default_factory=KvAwareConfig)
    line: LineConfig = field(default_factory=LineConfig)


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """`[kv_cache]`: what the engines have behind their GPU cache. `l2_hash_seed`: their PYTHONHASHSEED."""

    l2: str | None = _key(None, _store_url())
    l2_format: str = _key("lmcache", _one_of("lmcache"))
    l2_password_env: str | None = _key(None, _environment_name())
    l2_tls_ca: str | None = _key(None, _path())
    l2_hash_seed: int = _key(0, _integer(0, 4_294_967_295))
    l2_time_limit_s: float = _key(0.02, _number(0.001, 10.0, "seconds"))
    l2_password: str | None = field(default=None, repr=False)  # not a key: the value of the variable of l2_password_env


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """`[[backends]]`: one engine. `url` is scheme://host:port; `name` is never empty after loading."""

    url: str = _required(_backend_url())
    name: str = _key(
        "",  # host:port
        _text(r"[A-Za-z0-9\[][A-Za-z0-9._:@\[\]-]{0,127}", "a name of letters, digits and . _ : @ [ ] -, at most 128"),
    )
    weight: float = _key(1.0, _number(0.001, 1000.0))
    models: tuple[str, ...] | None = _key(
        None, _array(_MODEL, "an array of 1 to 4096 models' names", least=1, most=4096)
    )
    api_key_env: str | None = _key(None, _environment_name())
    kv_events: str = _key("auto", _kv_events())
    tls_ca: str | None = _key(None, _path())
    tls_verify: bool = _key(True, _flag())
    api_key: str | None = field(default=None, repr=False)  # not a key: the value of the variable that api_key_env names

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """`[models]`: `aliases` from a client's name to the fleet's, `tokenizers` from a model to its folder."""

    aliases: Mapping[str, str] = _mapping_key(
        _text_table(_MODEL, _MODEL, 'a table of alias = "model", at most 4096', most=4096)
    )
    tokenizers: Mapping[str, str] = _mapping_key(
        _text_table(_MODEL, _path(), 'a table of model = "folder", at most 4096', most=4096)
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """`[limits]`. A cap of 0 means no cap."""

    max_body_bytes: int = _key(268_435_456, _integer(1024, 2**31 - 1, "bytes"))
    max_header_bytes: int = _key(65_536, _integer(1024, 1_048_576, "bytes"))
    max_connections: int = _key(0, _integer(0, 1_000_000))
    max_in_flight: int = _key(0, _integer(0, 1_000_000))
    max_in_flight_per_backend: int = _key(0, _integer(0, 1_000_000))
    max_queue: int = _key(1000, _integer(0, 1_000_000))
    queue_timeout_s: float = _key(30.0, _seconds())


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    """`[timeouts]`, all in seconds."""

    connect_s: float = _key(2.0, _seconds())
    first_byte_s: float = _key(600.0, _seconds())
    idle_s: float = _key(300.0, _seconds())
    client_body_s: float = _key(60.0, _seconds())
    client_keepalive_s: float = _key(75.0, _seconds())
    upstream_keepalive_s: float = _key(4.0, _seconds())
    lame_duck_s: float = _key(1.0, _number(0.0, 3600.0, "seconds"))
    drain_s: float = _key(120.0, _number(0.0, 86_400.0, "seconds"))


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """`[retry]`."""

    attempts: int = _key(2, _integer(0, 16))
    budget: float = _key(0.2, _number(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """`[health]`: active checks, and ejection by failed connections or by silence."""

    interval_s: float = _key(2.0, _number(0.05, 3600.0, "seconds"))
    timeout_s: float = _key(2.0, _number(0.05, 3600.0, "seconds"))
    unhealthy_after: int = _key(3, _integer(1, 100))
    healthy_after: int = _key(2, _integer(1, 100))
    connect_failures: int = _key(2, _integer(1, 100))
    failed_attempts: int = _key(5, _integer(1, 1000))
    silence_s: float = _key(30.0, _seconds())
    ejection_s: float = _key(5.0, _seconds())
    ejection_max_s: float = _key(60.0, _seconds())


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """`[auth]`: without a file of keys the gateway is open."""

    api_keys_file: str | None = _key(None, _path())
    # not a key: what the file holds, SHA-256 digest of a key -> its name; None: open
    keys: Mapping[bytes, str] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """`[redis]`: without a URL everything stays in this process tree."""

    url: str | None = _key(None, _url("redis", "rediss", "unix"))


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`."""

    level: str = _key("info", _one_of("debug", "info", "warning", "error"))
    format: str = _key("text", _one_of("text", "json"))
    access: bool = _key(True, _flag())
    decisions: str = _key("off", _one_of("off", "on", "production-stack"))


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """`[tracing]`: spans over OTLP/HTTP, with the extra `kvgate[otel]`. Without an endpoint no span is made."""

    otlp_endpoint: str | None = _key(None, _url("http", "https"))
    headers_env: str | None = _key(None, _environment_name())
    sample_ratio: float = _key(1.0, _number(0.0, 1.0))
    service_name: str = _key("kvgate", _text(r"[!-~]{1,128}", "1 to 128 visible ASCII characters"))
    headers: str | None = field(default=None, repr=False)  # not a key: the value of the variable of headers_env


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """`[index]`: the mirror of the engines' prefix caches, and what their KV events tell.

    `assumed_kv_tokens`: an engine's capacity until it tells."""

    block_bytes: int = _key(128, _integer(16, 65_536, "bytes"))
    memory_limit_bytes: int = _key(268_435_456, _integer(1_048_576, 2**46, "bytes"))
    kv_memory_limit_bytes: int = _key(268_435_456, _integer(1_048_576, 2**46, "bytes"))
    assumed_kv_tokens: int = _key(500_000, _integer(1, 10**12, "tokens"))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file. Equal to another exactly if the gateway would behave the same."""

    server: ServerConfig = field(default_factory=ServerConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    backends: tuple[BackendConfig, ...] = field(default=(), metadata={"tables": BackendConfig})
    models: ModelsConfig = field(default_factory=ModelsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    log: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    index: IndexConfig = field(default_factory=IndexConfig)


# --- reading ---------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of a file. Raises ConfigError with every fault, also where the file cannot be read."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError([Fault(str(path), error.strerror or "unreadable", "a file that can be read")]) from None
    return parse(text, name=str(path), environ=environ)


def parse(
    source: bytes | Mapping[str, Any], *, name: str = "configuration", environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration of TOML bytes, or of the tables they hold. `name` stands in for a key path in faults that have
    none; secrets are looked up in `environ`, by default the process's. Raises ConfigError with every fault."""
    document = _toml(source, name) if isinstance(source, bytes) else source
    faults: list[Fault] = []
    values = _read_table(Config, document, "", "", faults)
    config = _with_secrets(Config(**values), os.environ if environ is None else environ, faults)
    faults.extend(_contradictions(config))
    if faults:
        raise ConfigError(faults)
    return config


def parse_backend(table: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> BackendConfig:
    """One table of `[[backends]]`. Raises ConfigError with every fault, key paths beginning at the table."""
    try:
        values = parse({"backends": [table]}, environ=environ)
    except ConfigError as error:
        faults = [replace(fault, key_path=fault.key_path.removeprefix("backends[0].")) for fault in error.faults]
        raise ConfigError(faults) from None
    return values.backends[0]


@dataclass(frozen=True, slots=True)
class Change:
    """One key whose value is another, both as they may be shown; for a backend, what became of it."""

    key_path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key_path}: {self.before} -> {self.after}"


def changes(old: Config, new: Config) -> list[Change]:
    """In the order of the file. Secrets show only that they changed."""
    found = list(_table_changes(old, new, ""))
    before, after = ({backend.name: backend for backend in config.backends} for config in (old, new))
    for name in before.keys() - after.keys():
        found.append(Change(f"backends.{_join('', name)}", before[name].url, "removed"))
    for name, backend in after.items():
        if name not in before:
            found.append(Change(f"backends.{_join('', name)}", "absent", backend.url))
        else:
            found.extend(_table_changes(before[name], backend, f"backends.{_join('', name)}"))
    return found


def _table_changes(old: Any, new: Any, path: str) -> Iterator[Change]:
    for spec in fields(old):
        before, after = getattr(old, spec.name), getattr(new, spec.name)
        where = _join(path, spec.name)
        if before == after or "tables" in spec.metadata:
            continue
        if is_dataclass(before):
            yield from _table_changes(before, after, where)
        elif not spec.metadata:  # a secret, behind the key that names its place
            yield Change(where, "(hidden)", "(hidden)")
        else:
            show = spec.metadata["rule"].show
            yield Change(where, *("absent" if value is None else show(value) for value in (before, after)))


def with_flags(
    config: Config,
    *,
    backends: Sequence[str] = (),
    strategy: str | None = None,
    host: str | None = None,
    port: int | None = None,
    workers: int | None = None,
) -> Config:
    """The configuration with the command line's word over the file's. Backends given as URLs replace the file's.
    Raises ConfigError with the flag in place of the key path."""
    faults: list[Fault] = []
    server: dict[str, Any] = {}
    for key, value in (("host", host), ("port", port), ("workers", workers)):
        if value is not None:
            _read_key(_keys(ServerConfig)[key], value, f"--{key}", f"server.{key}", server, faults)
    routing: dict[str, Any] = {}
    if strategy is not None:
        _read_key(_keys(RoutingConfig)["strategy"], strategy, "--strategy", "routing.strategy", routing, faults)
    fleet: list[BackendConfig] = []
    for url in backends:
        backend: dict[str, Any] = {}
        _read_key(_keys(BackendConfig)["url"], url, "--backend", "backends.url", backend, faults)
        if "url" in backend:
            named = BackendConfig(url=backend["url"], name=_default_name(backend["url"]))
            if any(named.name == other.name for other in fleet):
                faults.append(Fault("--backend", _shown(url), "each backend once"))
            fleet.append(named)
    changed = replace(
        config,
        server=replace(config.server, **server),
        routing=replace(config.routing, **routing),
        backends=tuple(fleet) if backends else config.backends,
    )
    faults.extend(_contradictions(changed))
    if faults:
        raise ConfigError(faults)
    return changed


def key_paths() -> Iterator[tuple[str, Any]]:
    """Every key of the file with its default: `("server.port", 8080)`. None for a key that is absent by default,
    dataclasses.MISSING for one that must be given; `[[backends]]` counts as one table `backends`."""
    yield from _paths(Config, "")


def _paths(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, spec in _keys(cls).items():
        inner = _inner(spec) or spec.metadata.get("tables")
        if inner is not None:
            yield from _paths(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, spec.default_factory() if callable(spec.default_factory) else spec.default


def _toml(source: bytes, name: str) -> dict[str, Any]:
    if len(source) > FILE_LIMIT_BYTES:
        raise ConfigError([Fault(name, "a file too large", f"at most {FILE_LIMIT_BYTES} bytes")])
    try:
        text = source.decode()
    except UnicodeDecodeError as error:
        where = _position(source[: error.start].decode())
        raise ConfigError([Fault(name, f"not UTF-8 at {where}", "TOML in UTF-8")]) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser says where, except at the end of the document.
        problem = str(error).replace("at end of document", f"at {_position(text)}, the end")
        raise ConfigError([Fault(name, problem, "TOML")]) from None
    except RecursionError:
        raise ConfigError([Fault(name, "arrays or tables nested too deep", "TOML")]) from None


def _position(before: str) -> str:
    """Of what follows `before`, as tomllib words it: both counted from 1."""
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"


def _keys(cls: type) -> dict[str, Field[Any]]:
    """The fields of a table that are keys of the file."""
    assert is_dataclass(cls)
    return {spec.name: spec for spec in fields(cls) if spec.metadata or _inner(spec)}


def _is_required(spec: Field[Any]) -> bool:
    return spec.default is MISSING and not callable(spec.default_factory)


def _inner(spec: Field[Any]) -> type | None:
    """The class of a field that is a table itself."""
    factory: object = spec.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def _read_table(cls: type, raw: object, path: str, pattern: str, faults: list[Fault]) -> dict[str, Any]:
    """The good values of one table; what is wrong goes to `faults`. `pattern` is the path without indexes."""
    if not isinstance(raw, Mapping):
        faults.append(Fault(path, _shown(raw), f"a table, [{path}]"))
        return {}
    known = _keys(cls)
    values: dict[str, Any] = {}
    faults.extend(_unknown_key(key, _join(path, key), known) for key in raw if key not in known)
    for key, spec in known.items():
        key_path, key_pattern = _join(path, key), _join(pattern, key)
        if key not in raw:
            if _is_required(spec):
                faults.append(Fault(key_path, "missing", spec.metadata["rule"].expected))
        elif inner := _inner(spec):
            values[key] = inner(**_read_table(inner, raw[key], key_path, key_pattern, faults))
        elif "tables" in spec.metadata:
            values[key] = _read_tables(spec.metadata["tables"], raw[key], key_path, key_pattern, faults)
        else:
            _read_key(spec, raw[key], key_path, key_pattern, values, faults)
    return values


def _read_tables(cls: type, raw: object, path: str, pattern: str, faults: list[Fault]) -> tuple[Any, ...]:
    if not isinstance(raw, list | tuple):
        faults.append(Fault(path, _shown(raw), f"an array of tables, [[{path}]]"))
        return ()
    if len(raw) > BACKENDS_LIMIT:
        faults.append(Fault(path, f"{len(raw)} tables", f"at most {BACKENDS_LIMIT}"))
        return ()
    read = []
    for number, item in enumerate(raw):
        values = _read_table(cls, item, f"{path}[{number}]", pattern, faults)
        # A placeholder keeps the positions right for the faults that are found later; it never leaves parse().
        read.append(cls(**{"url": "", **values}))
    return tuple(read)


def _read_key(
    spec: Field[Any], raw: object, path: str, pattern: str, values: dict[str, Any], faults: list[Fault]
) -> None:
    rule: _Rule = spec.metadata["rule"]
    try:
        value = rule.read(raw)
    except _Unexpected as error:
        shown = rule.show(raw) if error.value is MISSING else _shown(error.value)
        faults.append(Fault(path + error.at, shown, error.expected))
        return
    except ValueError:
        faults.append(Fault(path, rule.show(raw), rule.expected))
        return
    works = NOT_BUILT.get(pattern)
    if works is not None and not works(value):
        faults.append(Fault(path, rule.show(raw), f"{_what_works(spec)}: not built yet; leave it at its default"))
        return
    values[spec.name] = value


def _what_works(spec: Field[Any]) -> str:
    if _is_required(spec):
        return "an http:// URL"
    return _shown(spec.default) if spec.default not in (None, MISSING) else "nothing here"


def _join(path: str, key: str) -> str:
    """As TOML writes it: a key of other characters in quotes."""
    part = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key[:100])
    return f"{path}.{part}" if path else part


def _unknown_key(key: str, path: str, known: Mapping[str, object]) -> Fault:
    """Its value is not shown: it may be a secret in a place where none belongs."""
    close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6)
    elsewhere = [other for other, _ in key_paths() if other.rpartition(".")[2] == key]
    if close:
        meant = f'; did you mean "{close[0]}"?'
    elif elsewhere:
        meant = f"; did you mean {' or '.join(elsewhere)}?"
    else:
        meant = ""
    return Fault(path, "unknown key", f"one of {', '.join(known)}{meant}")


def _named(
    backends: Sequence[BackendConfig], environ: Mapping[str, str], faults: list[Fault]
) -> tuple[BackendConfig, ...]:
    """With default names and secrets filled in; two of one name are a fault."""
    complete: list[BackendConfig] = []
    first_with: dict[str, int] = {}
    for number, backend in enumerate(backends):
        if not backend.url:
            continue
        name = backend.name or _default_name(backend.url)
        other = first_with.setdefault(name, number)
        if other != number:
            faults.append(
                Fault(f"backends[{number}].name", _shown(name), f"a name of its own; backends[{other}] has this one")
            )
        api_key = _secret(backend.api_key_env, f"backends[{number}].api_key_env", environ, faults)
        complete.append(replace(backend, name=name, api_key=api_key))
    return tuple(complete)


def _with_secrets(config: Config, environ: Mapping[str, str], faults: list[Fault]) -> Config:
    """With everything filled in that the file only points to."""
    admin, tracing, auth, kv_cache = config.admin, config.tracing, config.auth, config.kv_cache
    _try_certificates(config, faults)
    _try_tokenizers(config, faults)
    return replace(
        config,
        admin=replace(admin, token=_secret(admin.token_env, "admin.token_env", environ, faults)),
        kv_cache=replace(
            kv_cache, l2_password=_secret(kv_cache.l2_password_env, "kv_cache.l2_password_env", environ, faults)
        ),
        backends=_named(config.backends, environ, faults),
        tracing=replace(tracing, headers=_secret(tracing.headers_env, "tracing.headers_env", environ, faults)),
        auth=replace(auth, keys=_api_keys(auth.api_keys_file, faults)),
    )


def _try_certificates(config: Config, faults: list[Fault]) -> None:
    """The files are read again when they are used; here a bad one is named before anything starts."""
    server = config.server
    if server.tls_cert is not None and server.tls_key is not None:
        try:
            tls.server_context(server.tls_cert, server.tls_key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            shown = f"{_shown(server.tls_cert)} with {_shown(server.tls_key)}: {tls.describe(error)}"
            faults.append(
                Fault("server.tls_cert", shown, "PEM files of a certificate and its private key, unencrypted")
            )
    authorities = [(f"backends[{number}].tls_ca", backend.tls_ca) for number, backend in enumerate(config.backends)]
    for path, authority in (*authorities, ("kv_cache.l2_tls_ca", config.kv_cache.l2_tls_ca)):
        if authority is not None:
            try:
                tls.client_context(authority, verify=True)
            except (OSError, ValueError) as error:
                faults.append(
                    Fault(path, f"{_shown(authority)}: {tls.describe(error)}", "a PEM file of CA certificates")
                )


def _try_tokenizers(config: Config, faults: list[Fault]) -> None:
    """What is in a folder is read when a model needs it; one that cannot be meant is named before anything starts."""
    named = {_join("models.tokenizers", model): folder for model, folder in config.models.tokenizers.items()}
    if config.routing.kvaware.tokenizer is not None:
        named = {"routing.kvaware.tokenizer": config.routing.kvaware.tokenizer, **named}
    for key_path, folder in named.items():
        try:
            tls.require_regular_file(os.path.join(folder, "tokenizer.json"))
        except OSError as error:
            shown = f"{_shown(folder)}: {error.strerror or 'unreadable'}"
            faults.append(Fault(key_path, shown, "a folder with a tokenizer.json"))


_API_KEY_LINE: Final = re.compile(r"([!-9;-~]{1,64}):(?:sha256:([0-9A-Fa-f]{64})|([!-~]{1,4096}))")


def _api_keys(path: str | None, faults: list[Fault]) -> Mapping[bytes, str] | None:
    """The keys of `auth.api_keys_file`: one a line, "name:key" or "name:sha256:HEX"; empty lines and such that begin
    with # mean nothing. A fault names the line and never shows it."""
    if path is None:
        return None
    where = "auth.api_keys_file"
    try:
        tls.require_regular_file(path)
        with Path(path).open("rb") as file:
            source = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        faults.append(Fault(where, f"{_shown(path)}: {error.strerror or 'unreadable'}", "a file that can be read"))
        return None
    if len(source) > FILE_LIMIT_BYTES:
        faults.append(Fault(where, f"{_shown(path)}: too large", f"at most {FILE_LIMIT_BYTES} bytes"))
        return None
    keys: dict[bytes, str] = {}
    for number, line in enumerate(source.decode("utf-8", "replace").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        matched = _API_KEY_LINE.fullmatch(line)
        if matched is None or (matched[3] is not None and matched[3].startswith("sha256:")):
            expected = '"name:key" of 1 to 4096 visible ASCII characters, or "name:sha256:HEX"'
            faults.append(Fault(where, f"{_shown(path)}, line {number}", expected))
            continue
        digest = bytes.fromhex(matched[2]) if matched[2] is not None else hashlib.sha256(matched[3].encode()).digest()
        if digest in keys:
            faults.append(Fault(where, f"{_shown(path)}, line {number}", "each key once"))
        keys[digest] = matched[1]
    if not keys and not any(fault.key_path == where for fault in faults):
        faults.append(
            Fault(where, f"{_shown(path)}: no key in it", "at least one key; leave it out for an open gateway")
        )
    return keys


def _default_name(url: str) -> str:
    return url.partition("://")[2]


def _secret(variable: str | None, path: str, environ: Mapping[str, str], faults: list[Fault]) -> str | None:
    """Its value without surrounding white space, as mounted secrets often end in a newline."""
    if variable is None:
        return None
    shown = _environment_name().show(variable)
    secret = environ.get(variable)
    if secret is None:
        faults.append(Fault(path, shown, "the name of an environment variable that is set"))
        return None
    secret = secret.strip()
    # It goes into a header: anything else could add one of its own.
    if not re.fullmatch(r"[!-~]{1,4096}", secret):
        faults.append(Fault(path, shown, "the name of a variable with 1 to 4096 visible ASCII characters in it"))
        return None
    return secret


def _can_export_spans() -> bool:
    """Whether the extra is installed; nothing of it is loaded for that but empty packages."""
    try:
        return (
            importlib.util.find_spec("opentelemetry.sdk.trace") is not None
            and importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False


def _can_tokenize() -> bool:
    """Whether kvgate[tokenizers] is installed; nothing of it is loaded for that."""
    return importlib.util.find_spec("tokenizers") is not None and importlib.util.find_spec("jinja2") is not None


def _contradictions(config: Config) -> Iterator[Fault]:
    """Values that are right alone and wrong together."""
    health, server, admin = config.health, config.server, config.admin
    if (server.tls_cert is None) != (server.tls_key is None):
        yield Fault(f"server.{'tls_cert' if server.tls_cert is None else 'tls_key'}", "missing", "both or neither")
    for number, backend in enumerate(config.backends):
        path = f"backends[{number}].tls_ca"
        if backend.tls_ca is not None and not backend.url.startswith("https:"):
            yield Fault(path, _shown(backend.tls_ca), "an https:// url with it")
        elif backend.tls_ca is not None and not backend.tls_verify:
            yield Fault(path, _shown(backend.tls_ca), "tls_verify = true with it")
    store = config.kv_cache
    if store.l2_password_env is not None and store.l2 is None:
        yield Fault("kv_cache.l2_password_env", _environment_name().show(store.l2_password_env), "kv_cache.l2 with it")
    if store.l2_tls_ca is not None and not (store.l2 or "").startswith("rediss:"):
        yield Fault("kv_cache.l2_tls_ca", _shown(store.l2_tls_ca), "a rediss:// url in kv_cache.l2 with it")
    for alias, model in config.models.aliases.items():
        if model in config.models.aliases:
            yield Fault(_join("models.aliases", alias), _shown(model), "a model of the fleet, not another alias")
    if config.tracing.otlp_endpoint is not None and not _can_export_spans():
        yield Fault(
            "tracing.otlp_endpoint", _shown(config.tracing.otlp_endpoint), "kvgate[otel] installed, which it needs"
        )
    kvaware = config.routing.kvaware
    if config.routing.strategy == "kvaware" and not _can_tokenize():
        needed = "kvgate[tokenizers] installed, which it needs"
        if kvaware.tokenization == "local":
            yield Fault("routing.kvaware.tokenization", _shown(kvaware.tokenization), needed)
        elif kvaware.tokenization == "auto" and kvaware.tokenizer is not None:
            yield Fault("routing.kvaware.tokenizer", _shown(kvaware.tokenizer), needed)
        elif kvaware.tokenization == "auto" and config.models.tokenizers:
            yield Fault("models.tokenizers", "folders", needed)
    if health.ejection_max_s < health.ejection_s:
        yield Fault(
            "health.ejection_max_s", _shown(health.ejection_max_s), f"at least health.ejection_s, {health.ejection_s}"
        )
    if admin.port == server.port != 0 and (admin.host == server.host or {admin.host, server.host} & {"0.0.0.0", "::"}):
        yield Fault("admin.port", str(admin.port), "another port than server.port")
