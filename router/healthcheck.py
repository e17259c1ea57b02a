"""`kvgate healthcheck`: does the gateway in this container answer? For the image's HEALTHCHECK.

A container's check is fixed when its image is built, while flags, the configuration file and `port = 0` decide only at
the start where the gateway listens and whether it speaks TLS. So nothing is configured twice and nothing is guessed:
/proc tells on which TCP sockets process 1 and its descendants listen, and each is asked for `GET /livez`, in plain HTTP
and then in TLS. The data port alone answers that with 200; the admin port does not.

Alive is what this asks, not whether engines are up: a gateway without engines must not be restarted for it.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import re
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
TIMEOUT_S: Final = 1.0  # for each step of an answer: connect, write, read. One machine's loopback, so it is plenty
LISTEN: Final = "0A"  # a socket's state in /proc/net/tcp
SOCKETS_LIMIT: Final = 64  # asked at most: a check has to end

Address = tuple[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, default=1, metavar="PID", help="the gateway's process, or its parent")


def run(arguments: argparse.Namespace) -> int:
    """0 and one line on standard output if a gateway answers, else 1 and the reason on standard error."""
    try:
        addresses = listening(arguments.pid, PROC)
    except OSError as error:  # not there, or another user's
        print(f"kvgate healthcheck: process {arguments.pid}: {error.strerror}", file=sys.stderr)
        return 1
    if not addresses:
        print(f"kvgate healthcheck: process {arguments.pid} and its children listen nowhere", file=sys.stderr)
        return 1
    answers = []
    for address in addresses[:SOCKETS_LIMIT]:
        alive, answer = ask(address)
        if alive:
            print(answer)
            return 0
        answers.append(answer)
    print("kvgate healthcheck: nobody answers /livez: " + "; ".join(answers), file=sys.stderr)
    return 1


def listening(pid: int, proc: Path) -> list[Address]:
    """Where the process and its descendants listen for TCP, each address once, as a client on this machine reaches it.
    OSError: the process is not there, or not to be looked into."""
    inodes = _socket_inodes(proc / str(pid))
    for child in _descendants(pid, proc):
        try:
            inodes |= _socket_inodes(proc / str(child))
        except OSError:  # ended meanwhile; or a child that gave itself another user
            continue
    found: dict[Address, None] = {}
    for table in ("tcp", "tcp6"):
        try:
            with open(proc / str(pid) / "net" / table) as lines:
                for address, inode in _listeners(lines):
                    if inode in inodes:
                        found[address] = None
        except FileNotFoundError:  # a kernel without IPv6
            continue
    return list(found)


def _socket_inodes(process: Path) -> set[str]:
    inodes = set()
    for link in (process / "fd").iterdir():
        try:
            target = link.readlink().name
        except FileNotFoundError:  # closed meanwhile
            continue
        matched = re.fullmatch(r"socket:\[(\d+)\]", target)
        if matched:
            inodes.add(matched[1])
    return inodes


def _descendants(pid: int, proc: Path) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in proc.iterdir():
        if process.name.isdigit():
            try:
                # pid (name) state ppid ...: a name may hold blanks and parentheses
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # ended meanwhile
                continue
            children.setdefault(parent, []).append(int(process.name))
    found = children.get(pid, [])
    for child in found:  # grows while it is read
        found.extend(children.get(child, []))
    return found


def _listeners(lines: Iterator[str]) -> Iterator[tuple[Address, str]]:
    next(lines, None)  # the names of the columns
    for line in lines:
        columns = line.split()
        if columns[3] == LISTEN:
            host, _, port = columns[1].partition(":")
            yield (_reachable(host), int(port, 16)), columns[9]


def _reachable(hexadecimal: str) -> str:
    """The address of /proc/net/tcp*, which is 32-bit words in the machine's byte order; "any" becomes loopback."""
    words = [int(hexadecimal[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address)


def ask(address: Address) -> tuple[bool, str]:
    """Whether GET /livez is answered there with 200, and what to tell of it."""
    host, port = address
    plain = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    told = ""
    try:
        status = _status(plain)
    except TimeoutError:  # it accepts and is silent: a question in TLS would wait as long
        return False, f"{_url('http', address)}: no answer in {TIMEOUT_S:g} s"
    except (OSError, http.client.HTTPException) as error:
        told = f"{_url('http', address)}: {type(error).__name__}"
    else:
        return status == 200, f"{_url('http', address)}: {status}"
    # The certificate is for the names that clients use, and this is our own process: nothing to verify.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        status = _status(http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context))
    except (OSError, http.client.HTTPException) as error:
        return False, f"{told}, with TLS {type(error).__name__}"
    return status == 200, f"{_url('https', address)}: {status}"


def _status(connection: http.client.HTTPConnection) -> int:
    try:
        connection.request("GET", "/livez", headers={"Connection": "close"})
        return connection.getresponse().status
    finally:
        connection.close()


def _url(scheme: str, address: Address) -> str:
    host, port = address
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/livez"
