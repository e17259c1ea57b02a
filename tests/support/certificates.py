"""A CA made for one test, and certificates of it for 127.0.0.1 and localhost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """PEM files: the CA's certificate, a server's certificate with its chain, and that server's key."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path, *names: str) -> Certificates:
    """`names`: whom the server's certificate is for, by default both names of this machine's loopback."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    authority.cert_pem.write_to_path(made.ca)
    issued.private_key_pem.write_to_path(made.key)
    made.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return made
