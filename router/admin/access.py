"""Who may change something through the admin port.

Loopback needs no token: whoever can open a socket on this machine may also send it signals. That trust has two holes,
both of them browsers. A page from anywhere can make the browser on this machine send a request here: such a request
tells its origin. And a page may have its own name resolve to 127.0.0.1, so that it is of one origin with us (DNS
rebinding): such a request names a host that is none of ours. From anywhere else a token is needed. Addresses that a
header tells of are nobody's proof and are not read: a proxy on this machine that forwards to the admin port gives
its own clients the trust of loopback, and has to ask them who they are.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from router.errors import RouterError, Source

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@/\s]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
# What a browser says of a request: "none" is a person's own doing, such as a bookmark.
_OWN_SITES = ("same-origin", "none")


@dataclass(frozen=True, slots=True)
class Asker:
    """What is known of the sender of a request: the socket's peer address, and headers as they came, each with all of
    its values."""

    peer: str | None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    fetch_sites: Sequence[str] = ()
    authorizations: Sequence[str] = ()


def refusal_of_change(asker: Asker, *, admin_host: str, token: str | None) -> RouterError | None:
    """None: the change may be made. `admin_host`: the address or name that the port was configured to listen on."""
    if _is_foreign_page(asker):
        return _refused(403, "cross_site", "A page of another origin may not change the fleet.")
    if is_loopback(asker.peer) and _is_own_host(asker.hosts, admin_host):
        return None
    if token is None:
        where = (
            "under a name that is neither an address nor localhost" if is_loopback(asker.peer) else "not from loopback"
        )
        return _refused(
            403,
            "no_admin_token",
            f"This request came {where}: such changes need a token, and none is configured ([admin] token_env).",
        )
    if not _carries(asker.authorizations, token):
        return _refused(401, "invalid_admin_token", "This change needs the header `Authorization: Bearer TOKEN`.")
    return None


def is_loopback(peer: str | None) -> bool:
    """Also for an IPv4 address inside of an IPv6 one, as a dual-stack socket shows it."""
    try:
        address = ip_address((peer or "").partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _is_foreign_page(asker: Asker) -> bool:
    if any(site.strip().lower() not in _OWN_SITES for site in asker.fetch_sites):
        return True
    return any(not _is_same_origin(origin, asker.hosts) for origin in asker.origins)


def _is_same_origin(origin: str, hosts: Sequence[str]) -> bool:
    """By host and port. A proxy in front may speak https where we speak http, so the scheme is the origin's to say."""
    scheme, separator, authority = origin.strip().lower().partition("://")
    default_port = _DEFAULT_PORTS.get(scheme)
    if not separator or default_port is None or len(hosts) != 1:
        return False
    asked, said = _split(hosts[0]), _split(authority)
    return asked is not None and said is not None and _with_port(asked, default_port) == _with_port(said, default_port)


def _is_own_host(hosts: Sequence[str], admin_host: str) -> bool:
    """Browsers always send a Host; without one it is a program of this machine."""
    if not hosts:
        return True
    split = _split(hosts[0]) if len(hosts) == 1 else None
    if split is None:
        return False
    name = split[0]
    if name in ("localhost", admin_host.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _split(authority: str) -> tuple[str, str] | None:
    """Host in lower case without brackets, and port, empty if it is not said. None: not a host at all."""
    matched = _AUTHORITY.fullmatch(authority.strip().lower())
    return None if matched is None else (matched[1].strip("[]"), matched[2] or "")


def _with_port(split: tuple[str, str], default_port: str) -> tuple[str, str]:
    return split[0], split[1] or default_port


def _carries(authorizations: Sequence[str], token: str) -> bool:
    """Takes equally long for every wrong token of one length."""
    if len(authorizations) != 1:
        return False
    scheme, _, presented = authorizations[0].strip().partition(" ")
    equal = hmac.compare_digest(presented.strip().encode("utf-8", "surrogateescape"), token.encode())
    return equal and scheme.lower() == "bearer"


def _refused(status: int, code: str, message: str) -> RouterError:
    return RouterError(status, code, message, source=Source.CLIENT)
