"""Who may ask: the keys of `[auth]`, known by their SHA-256 alone.

A key is 1 to 4096 characters that somebody made up, so a fast digest is only as good as the key is long; what it keeps
safe is the file. A presented key is hashed, its digest looked up, and what is found compared in constant time: what can
be timed is how far a digest agrees with another, and nobody can choose a digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from native.body_framing import Framing
from router.wire.http_head import RequestHead

# Asked by load balancers and kubelets, which have no key. Open only as far as they are answered here, which needs no
# body: nobody without a key reaches an engine, or makes us read what he sends.
_OPEN_PATHS: Final = frozenset((b"/health", b"/ping", b"/livez", b"/readyz"))
_OPEN_METHODS: Final = frozenset((b"GET", b"HEAD"))
_CHUNKED: Final = Framing.CHUNKED
_KEY_HEADERS: Final = (b"authorization", b"x-api-key")


def needs_key(head: RequestHead) -> bool:
    """Every path but four: where `[auth]` is configured."""
    if head.path not in _OPEN_PATHS:
        return True
    if head.method not in _OPEN_METHODS and not (head.path == b"/ping" and head.method == b"POST"):
        return True
    return head.framing is _CHUNKED or head.content_length > 0


class Caller:
    """Who was let in: the name that the operator gave the key, and the headers that carried it."""

    __slots__ = ("headers", "name")

    def __init__(self, name: str, headers: frozenset[bytes]) -> None:
        self.name = name
        self.headers = headers


class ApiKeys:
    """`names`: the SHA-256 digest of each key -> its name."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._keys = {digest: (digest, name) for digest, name in names.items()}

    def __repr__(self) -> str:
        return f"<ApiKeys {len(self._keys)}>"

    def caller(self, head: RequestHead) -> Caller | None:
        """None without a key that is known. A second key, perhaps for the engine, does no harm to a good one.
        Costs about 2 us."""
        found = ""
        headers: list[bytes] = []
        for header in _KEY_HEADERS:
            value = head.header(header)
            if value is None:
                continue
            if header == b"authorization":
                scheme, _, value = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            name = self._name_of(value.strip(b" \t"))
            if name is not None:
                found = found or name
                headers.append(header)
        return Caller(found, frozenset(headers)) if headers else None

    def _name_of(self, key: bytes) -> str | None:
        digest = sha256(key).digest()
        known, name = self._keys.get(digest, (b"", ""))
        return name if compare_digest(known, digest) else None
