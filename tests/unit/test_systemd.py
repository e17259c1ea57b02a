"""router/systemd.py: what is sent, and that a wrong environment sends nothing and harms nothing."""

import socket
from pathlib import Path

import pytest

from router.systemd import Notifier


@pytest.fixture
def receiver(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bound:
        bound.bind(str(tmp_path / "notify"))
        yield bound


def test_each_state_is_one_datagram(receiver: socket.socket):
    notifier = Notifier({"NOTIFY_SOCKET": receiver.getsockname()}, 1)
    notifier.ready("listening")
    notifier.reloading()
    notifier.stopping("draining")
    notifier.alive()
    assert receiver.recv(100) == b"READY=1\nSTATUS=listening"
    reloading = receiver.recv(100).decode().split("\n")
    assert reloading[0] == "RELOADING=1"
    assert reloading[1].removeprefix("MONOTONIC_USEC=").isdigit()
    assert receiver.recv(100) == b"STOPPING=1\nSTATUS=draining"
    assert receiver.recv(100) == b"WATCHDOG=1"
    notifier.close()
    notifier.alive()
    with pytest.raises(BlockingIOError):
        receiver.recv(100)


def test_an_abstract_socket_is_reached_too():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bound:
        bound.bind("")  # the kernel names it
        name = bound.getsockname()
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}, 1)
        notifier.alive()
        assert bound.recv(100) == b"WATCHDOG=1"
        notifier.close()


@pytest.mark.parametrize("path", ["", "vsock:2:1", "/nonexistent/socket", "relative"])
def test_without_a_usable_socket_nothing_is_sent(path: str):
    notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000000"}, 1)
    assert notifier.watchdog_s is None
    notifier.ready("listening")
    notifier.close()


def test_a_full_socket_loses_its_message_and_nothing_else(receiver: socket.socket):
    notifier = Notifier({"NOTIFY_SOCKET": receiver.getsockname()}, 1)
    for _ in range(100_000):
        notifier.alive()
    assert receiver.recv(100) == b"WATCHDOG=1"
    notifier.close()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_time_if_it_is_ours(receiver: socket.socket, variables, expected):
    notifier = Notifier({"NOTIFY_SOCKET": receiver.getsockname(), **variables}, 7)
    assert notifier.watchdog_s == expected
    notifier.close()
