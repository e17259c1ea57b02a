"""Where the shared store is, and the bounds of asking it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote, urlsplit

from router.config import KvCacheConfig


@dataclass(frozen=True, slots=True)
class L2Settings:
    """`url`: redis://[user@]host[:port][/db], or rediss:// over TLS. `hash_seed`: the engines' PYTHONHASHSEED."""

    url: str
    password: str | None = field(default=None, repr=False)
    hash_seed: int = 0
    # Made when a connection is, so that renewed certificates count; called for rediss:// only.
    tls_context: Callable[[], ssl.SSLContext] = ssl.create_default_context
    time_limit_s: float = 0.02  # of one question
    connect_s: float = 2.0
    stall_s: float = 1.0  # a server that owes an answer for so long is given up
    first_retry_s: float = 0.5
    longest_retry_s: float = 30.0
    max_chunks: int = 512  # of one prompt: 131,072 tokens in LMCache's chunks of 256
    open_keys_limit: int = 8192  # asked for and not answered
    remembered_limit: int = 32_768  # keys, about 220 bytes each
    present_age_s: float = 20.0  # for how long a key counts as there
    absent_age_s: float = 1.0  # and as not there: engines write all the time
    sample_first_s: float = 1.0  # between looks at the keys while none of a model that is served was seen
    sample_every_s: float = 60.0
    sample_keys: int = 1000  # of one look
    model_limit: int = 64  # that are followed

    @classmethod
    def of(cls, store: KvCacheConfig) -> L2Settings | None:
        """None: no store is configured."""
        if store.l2 is None:
            return None
        return cls(
            store.l2,
            store.l2_password,
            store.l2_hash_seed,
            tls_context=partial(ssl.create_default_context, cafile=store.l2_tls_ca),
            time_limit_s=store.l2_time_limit_s,
        )

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 6379

    @property
    def tls(self) -> bool:
        return urlsplit(self.url).scheme == "rediss"

    @property
    def user(self) -> str | None:
        name = urlsplit(self.url).username
        return unquote(name) if name else None

    @property
    def database(self) -> int:
        return int(urlsplit(self.url).path.strip("/") or 0)

    @property
    def shown_url(self) -> str:
        """For people: without the user."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
