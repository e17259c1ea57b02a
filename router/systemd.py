"""What systemd is told of the process's state (sd_notify(3)): datagrams to the socket that NOTIFY_SOCKET names.

Without that variable nothing is sent. A socket that is gone or full costs nothing but its message.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """`watchdog_s`: how often `alive` is to be called, None where systemd does not watch."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._socket: socket.socket | None = None
        self.watchdog_s: float | None = None
        path = environ.get("NOTIFY_SOCKET", "")
        if path[:1] not in ("/", "@"):  # others are not ours to serve (vsock)
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect("\0" + path[1:] if path[0] == "@" else path)
        except OSError:
            self.close()
            return
        every_us = environ.get("WATCHDOG_USEC", "")
        if every_us.isascii() and every_us.isdigit() and environ.get("WATCHDOG_PID", str(pid)) == str(pid):
            self.watchdog_s = int(every_us) / 1e6 / 2 or None  # twice within the time that systemd allows

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(message.encode())
