"""The unit file: what systemd itself says of it, and what the gateway needs of it."""

import shlex
import subprocess
import sys

import pytest

from router import cli, config
from tests.rules.source_tree import ROOT
from tests.support.debian_tools import program

UNIT = ROOT / "deploy" / "systemd" / "kvgate.service"


def entries() -> dict[str, list[str]]:
    """All values of a key, in order; a section is part of its name."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


@pytest.fixture
def installed(tmp_path):
    """The unit with a command that exists, as it does once it is installed."""
    copy = tmp_path / "kvgate.service"
    copy.write_text(UNIT.read_text().replace("/opt/kvgate/bin/kvgate", "/bin/true"))
    return copy


def test_systemd_has_nothing_to_complain_of(installed):
    done = subprocess.run(
        [program("systemd-analyze"), "verify", str(installed)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_finds_it_little_exposed(installed):
    """2.0 of 10 at most; what is left is that it may use the network."""
    done = subprocess.run(
        [program("systemd-analyze"), "security", "--offline=true", "--threshold=20", str(installed)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_is_one_that_the_gateway_knows():
    (command,) = entries()["Service.ExecStart"]
    path, *arguments = shlex.split(command)
    assert path.endswith("/bin/kvgate")
    parsed = cli._parser(arguments).parse_args(arguments)
    assert (parsed.command, parsed.config) == ("serve", "/etc/kvgate/kvgate.toml")


def test_it_is_told_of_the_start_reloads_by_sighup_and_waits_for_the_drain():
    unit = entries()
    assert unit["Service.Type"] == ["notify"]
    assert unit["Service.ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    timeouts = config.TimeoutsConfig()
    assert int(unit["Service.TimeoutStopSec"][0]) > timeouts.lame_duck_s + timeouts.drain_s


def test_wrong_configuration_is_not_tried_again():
    assert entries()["Service.RestartPreventExitStatus"] == ["2"]
    done = subprocess.run(
        [sys.executable, "-m", "router", "serve", "-c", "/nowhere/kvgate.toml"],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2


def test_it_has_no_user_of_its_own_and_no_right():
    unit = entries()
    assert unit["Service.DynamicUser"] == ["yes"]
    assert unit["Service.CapabilityBoundingSet"] == [""]
    assert unit["Service.NoNewPrivileges"] == ["yes"]
    assert unit["Service.ProtectSystem"] == ["strict"]
    assert int(unit["Service.LimitNOFILE"][0]) >= 65536
