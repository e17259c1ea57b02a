"""Where an engine's KV events are: read from /kv_event_sources (vLLM 0.31 and later), else from the configuration.

An engine's answer is untrusted: sizes and shapes are bounded, and only ports of the backend's own host are
connected to.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.backends.cures import PUBLISH_EVENTS
from router.kv_events.settings import RANKS_LIMIT

ANSWER_LIMIT_BYTES: Final = 1024 * 1024
TOPIC_LIMIT_BYTES: Final = 1024
_TCP: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:/\[\]\s]+):([0-9]{1,5})")
_ENGINE: Final = re.compile(rb'^vllm:num_requests_running\{[^}\n]*\bengine="([0-9]{1,3})"', re.MULTILINE)


class NoSource(Exception):
    """This engine or rank has no events for us; the text says why, and what cures it."""


@dataclass(frozen=True, slots=True)
class Source:
    """What to connect to. `topic` None: not known, any is taken. `hint`: what to think of where it is refused."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: bytes | None = None
    hint: str = ""


def read_sources(body: bytes, host: str) -> dict[int, Source | NoSource]:
    """Of an answer 200 to /kv_event_sources. NoSource: none at all. `host`: the backend's."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict):
        raise NoSource("malformed: /kv_event_sources answers no JSON object")
    if not told:
        raise NoSource(f"the engine publishes no KV events: {PUBLISH_EVENTS}")
    if len(told) > RANKS_LIMIT:
        raise NoSource(f"malformed: /kv_event_sources names more than {RANKS_LIMIT} ranks")
    found: dict[int, Source | NoSource] = {}
    for key, entry in told.items():
        if not re.fullmatch(r"[0-9]{1,6}", key) or not isinstance(entry, dict):
            raise NoSource("malformed: /kv_event_sources has an entry that is no rank")
        try:
            found[int(key)] = _read_entry(entry, host)
        except NoSource as reason:
            found[int(key)] = reason
    return found


def configured_sources(endpoint: str, ranks: list[int]) -> dict[int, Source | NoSource]:
    """`kv_events = "tcp://host:port"`: rank r publishes at port + r, as vLLM offsets it."""
    matched = _TCP.fullmatch(endpoint)
    if matched is None:
        raise NoSource(f'kv_events: expected "tcp://host:port", not {endpoint!r}')
    host, port = matched[1], int(matched[2])
    found: dict[int, Source | NoSource] = {}
    for rank in ranks:
        if port + rank > 65_535:
            found[rank] = NoSource(f"the port of rank {rank} would be {port + rank}: give kv_events a lower one")
        else:
            found[rank] = Source(f"tcp://{host}:{port + rank}")
    return found


def ranks_in_metrics(text: bytes) -> list[int]:
    """The data-parallel ranks that /metrics shows; [0] where it labels none."""
    ranks = sorted({int(rank) for rank in _ENGINE.findall(text)})[:RANKS_LIMIT]
    return ranks or [0]


def _read_entry(entry: dict[str, Any], host: str) -> Source:
    if entry.get("enable_kv_cache_events") is not True or entry.get("publisher") != "zmq":
        raise NoSource(f"the engine publishes no KV events: {PUBLISH_EVENTS}")
    topic, replay = entry.get("topic", ""), entry.get("replay_endpoint")
    if not isinstance(topic, str) or len(topic.encode()) > TOPIC_LIMIT_BYTES:
        raise NoSource("malformed: /kv_event_sources names a topic that is none")
    endpoint, hint = resolve(entry.get("endpoint"), host)
    return Source(
        endpoint=endpoint,
        replay_endpoint=None if replay is None else resolve(replay, host)[0],
        topic=topic.encode(),
        hint=hint,
    )


def resolve(endpoint: object, host: str) -> tuple[str, str]:
    """(What to connect to, a hint if that is refused) for an endpoint as the engine has it. NoSource: not for us."""
    if not isinstance(endpoint, str) or len(endpoint) > 256:
        raise NoSource("malformed: /kv_event_sources names an endpoint that is none")
    if endpoint.startswith("ipc://"):
        if not _is_loopback(host):
            raise NoSource(f"the engine publishes on {endpoint}, which only its own host can reach: {PUBLISH_EVENTS}")
        return endpoint, ""
    matched = _TCP.fullmatch(endpoint)
    if matched is None or not 0 < int(matched[2]) < 65_536:
        raise NoSource(f"the engine publishes on {_printable(endpoint)}, which is out of reach: {PUBLISH_EVENTS}")
    own, port = matched[1].strip("[]"), matched[2]
    target = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    if own in ("*", "0.0.0.0") or (":" in own and ipaddress_or_none(own) in (None, ipaddress.ip_address("::"))):
        return target, ""
    # vLLM binds only what has a wildcard, and connects to the rest. But for tcp://*:0 it binds the address that it has
    # for its own and any free port, and tells these: only a try can show which it was.
    hint = f"without a wildcard the engine connects to its endpoint instead of binding it; {PUBLISH_EVENTS}"
    if own == host or (_is_loopback(own) and _is_loopback(host)):
        return target, hint
    if _may_be_a_node(own):
        return endpoint, hint
    raise NoSource(
        f"the engine connects to {_printable(endpoint)}, which the gateway cannot bind; it binds where it has a "
        f"wildcard: {PUBLISH_EVENTS}"
    )


def ipaddress_or_none(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _may_be_a_node(own: str) -> bool:
    """Whether this may be an address by which a node knows itself: an engine cannot send us to ourselves, to a cloud's
    metadata, or to have a name looked up."""
    address = ipaddress_or_none(own)
    return address is not None and not (
        address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    )


def _is_loopback(host: str) -> bool:
    address = ipaddress_or_none(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
