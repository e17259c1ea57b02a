"""What the two ends of a connection may ask of an exchange, and an exchange of them.

net/ moves bytes and knows no routing; proxy/exchange.py implements these protocols.
"""

from __future__ import annotations

from typing import Protocol

from router.backends.backend import Backend
from router.errors import RouterError
from router.net.downstream import Downstream
from router.net.upstream import Upstream
from router.wire.http_head import RequestHead, ResponseHead


class DownstreamEvents(Protocol):
    """What a client's connection tells the exchange that it carries."""

    def refusal(self) -> RouterError | None:
        """Asked before a body is read: why it should not be. on_refused() follows."""

    def on_request(self, body: bytes) -> None:
        """The whole request is here."""

    def on_refused(self, error: RouterError) -> None:
        """The request cannot be read to its end: answer, then close."""

    def on_client_gone(self) -> None:
        """The client left; nothing can be sent any more."""

    def on_deadline(self) -> None:
        """The deadline that the exchange set on its connection has passed."""

    def on_client_slow(self) -> None:
        """The client reads slower than the engine writes."""

    def on_client_ready(self) -> None: ...

    def on_tunnel_data(self, data: bytes) -> None:
        """Client bytes after an upgrade."""


class UpstreamEvents(Protocol):
    """What an engine's connection tells the exchange whose request it carries."""

    def on_sent(self) -> None:
        """The last request byte left for the kernel."""

    def on_response_head(self, head: ResponseHead) -> None: ...

    def on_response_body(self, data: bytes) -> None:
        """Body bytes with their framing, exactly up to the body's end."""

    def on_response_end(self) -> None:
        """The body ended as it should. The connection is no longer the exchange's."""

    def on_upstream_lost(self, why: str, any_byte: bool) -> None:
        """The connection ended early, or broke HTTP. `any_byte`: something of the response had come."""

    def on_upstream_slow(self) -> None:
        """After an upgrade: the engine reads slower than the client writes."""

    def on_upstream_ready(self) -> None: ...

    def on_broken(self) -> None:
        """One of the above raised: a fault of ours. Called in the except clause."""


class ConnectEvents(Protocol):
    def on_connected(self, upstream: Upstream) -> None: ...

    def on_connect_failed(self, why: str, *, ours: bool = False) -> None:
        """`ours`: it says nothing of the backend, as where we are out of file descriptors."""


class ExchangeFactory(Protocol):
    def open_exchange(self, downstream: Downstream, head: RequestHead | None) -> DownstreamEvents:
        """A request began. `head` is None where it could not be read; on_refused follows."""


class Connecting(Protocol):
    def cancel(self) -> None: ...


class Connector(Protocol):
    """Opens connections to backends; tests put a scripted one here."""

    def connect(self, backend: Backend, events: ConnectEvents) -> Connecting: ...
