"""TLS contexts of both sides: our certificate for clients, the trust in the engines' certificates."""

from __future__ import annotations

import errno
import os
import ssl
import stat
from typing import Final

ALPN: Final = ["http/1.1"]


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """For the data port: TLS 1.2 and newer. OSError: a file cannot be read. ssl.SSLError: not PEM, or not a pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(ALPN)
    load_pair(context, cert, key)
    return context


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Give a server's context this certificate for the handshakes to come, also where it has another already."""
    require_regular_file(cert)
    require_regular_file(key)
    # A key with a passphrase would ask for it at the terminal: refused instead.
    context.load_cert_chain(cert, key, password=_no_passphrase)


def require_regular_file(path: str) -> None:
    """OSError for what is none: to open a pipe may wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", path)


def _no_passphrase() -> str:
    raise ssl.SSLError("the key is encrypted")


def client_context(ca: str | None, verify: bool) -> ssl.SSLContext:
    """For https engines. `ca`: a PEM file that takes the place of the system's CAs. Errors as of `server_context`."""
    if ca is not None:
        require_regular_file(ca)
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(ALPN)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class ClientContexts:
    """One context for each way to trust, read from disk once: it holds many certificates."""

    def __init__(self) -> None:
        self._made: dict[tuple[str | None, bool], ssl.SSLContext] = {}

    def of(self, ca: str | None, verify: bool) -> ssl.SSLContext:
        """Errors as of `client_context`. As many are kept as the fleet names."""
        found = self._made.get((ca, verify))
        if found is None:
            found = self._made[ca, verify] = client_context(ca, verify)
        return found

    def renew(self) -> None:
        """Read the files again at the next use."""
        self._made.clear()


def describe(error: Exception) -> str:
    """What is wrong with a file, in words without its content."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower() if error.reason else "not a PEM file of that kind"
    if isinstance(error, OSError):
        return error.strerror or "unreadable"
    return str(error)
