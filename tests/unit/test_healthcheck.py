"""What a container's health check finds in /proc."""

from argparse import Namespace

import pytest

from router import healthcheck

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LISTENING = "0A"
ESTABLISHED = "01"


@pytest.fixture
def proc(tmp_path):
    """A /proc of its own making: `proc.process(...)` adds a process, `proc.sockets(...)` its network's table."""

    class Proc:
        path = tmp_path

        def process(self, pid: int, parent: int = 0, name: str = "kvgate", inodes: tuple[int, ...] = ()) -> None:
            folder = tmp_path / str(pid)
            (folder / "fd").mkdir(parents=True)
            (folder / "net").mkdir()
            (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1\n")
            (folder / "fd" / "0").symlink_to("/dev/null")
            for number, inode in enumerate(inodes, 3):
                (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

        def sockets(self, pid: int, table: str, *entries: tuple[str, str, int]) -> None:
            lines = [
                f"   {number}: {address} 00000000:0000 {state} 0:0 00:00000000 00000000 10001 0 {inode} 1\n"
                for number, (address, state, inode) in enumerate(entries)
            ]
            (tmp_path / str(pid) / "net" / table).write_text(HEAD + "".join(lines))

    (tmp_path / "self").mkdir()
    return Proc()


@pytest.fixture(autouse=True)
def little_endian(monkeypatch):
    # the tables below are those of x86 and ARM
    monkeypatch.setattr(healthcheck.sys, "byteorder", "little")


def test_only_listening_sockets_of_the_process_itself_are_found(proc):
    proc.process(1, inodes=(10, 11))
    proc.sockets(
        1,
        "tcp",
        ("0100007F:2382", LISTENING, 10),
        ("0100007F:1F90", ESTABLISHED, 11),
        ("00000000:0016", LISTENING, 99),  # another's, in the same network
    )
    assert healthcheck.listening(1, proc.path) == [("127.0.0.1", 9090)]


def test_any_address_is_asked_on_loopback_and_others_where_they_are(proc):
    proc.process(1, inodes=(1, 2, 3, 4))
    proc.sockets(1, "tcp", ("00000000:1F90", LISTENING, 1), ("0700000A:1F91", LISTENING, 2))
    proc.sockets(
        1,
        "tcp6",
        ("00000000000000000000000000000000:1F92", LISTENING, 3),
        ("B80D0120000000000000000001000000:1F93", LISTENING, 4),
    )
    assert healthcheck.listening(1, proc.path) == [
        ("127.0.0.1", 8080),
        ("10.0.0.7", 8081),
        ("::1", 8082),
        ("2001:db8::1", 8083),
    ]


def test_children_count_below_an_init_and_a_supervisor(proc):
    proc.process(1, name="tini")
    proc.process(7, parent=1, name="a) S 9 (b")  # names lie
    proc.process(8, parent=7, inodes=(21,))
    proc.process(9, parent=7, inodes=(22,))  # shares the port
    proc.process(30, parent=2, inodes=(23,))  # not of this family
    proc.sockets(
        1,
        "tcp",
        ("00000000:1F90", LISTENING, 21),
        ("00000000:1F90", LISTENING, 22),
        ("00000000:2000", LISTENING, 23),
    )
    assert healthcheck.listening(1, proc.path) == [("127.0.0.1", 8080)]


def test_a_process_that_is_not_there_is_a_fault_of_its_own(proc, capsys, monkeypatch):
    monkeypatch.setattr(healthcheck, "PROC", proc.path)
    assert healthcheck.run(Namespace(pid=5)) == 1
    assert "process 5: No such file or directory" in capsys.readouterr().err


def test_nobody_who_listens_is_told(proc, capsys, monkeypatch):
    monkeypatch.setattr(healthcheck, "PROC", proc.path)
    proc.process(1)
    proc.sockets(1, "tcp")
    assert healthcheck.run(Namespace(pid=1)) == 1
    assert "listen nowhere" in capsys.readouterr().err
