"""router/cli.py: which command gets what, and the exit codes."""

import subprocess
import sys
from types import ModuleType

import pytest

from router import __version__, cli
from router.backends import probe as probe_module
from router.backends.probe import Finding, Probed
from router.config import Config


@pytest.fixture
def served(monkeypatch):
    """Stands in for the gateway; collects the configurations that it was started with."""
    started: list[Config] = []

    def run(config: Config, read: object) -> int:
        started.append(config)
        return 0

    module = ModuleType("router.app")
    module.run = run
    monkeypatch.setitem(sys.modules, "router.app", module)
    monkeypatch.setattr("router.app", module, raising=False)
    return started


@pytest.fixture
def probed(monkeypatch):
    """Stands in for asking the engines; what it holds is what they answer."""
    results: list[Probed] = []

    async def probe(backends, *, kv_events):
        assert len(backends) == 1
        return results

    monkeypatch.setattr(probe_module, "probe", probe)
    return results


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kvgate.toml"
    path.write_text('[server]\nport = 1234\n[[backends]]\nurl = "http://a:1"\n')
    return path


def usage_error(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    return caught.value.code


def test_serve_with_a_backend_alone_runs_the_default_configuration(served):
    assert cli.main(["serve", "--backend", "http://a:1", "--backend", "http://b:2"]) == 0
    (config,) = served
    assert [backend.name for backend in config.backends] == ["a:1", "b:2"]
    assert config.server == Config().server


def test_serve_with_a_file_alone_runs_the_file(served, file):
    assert cli.main(["serve", "-c", str(file)]) == 0
    assert served[0].server.port == 1234
    assert served[0].backends[0].name == "a:1"


def test_serve_with_a_file_without_backends_starts(served, tmp_path):
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert cli.main(["serve", "-c", str(empty)]) == 0
    assert served == [Config()]


def test_flags_of_serve_win_over_the_file(served, file):
    argv = ["serve", "-c", str(file), "--backend", "http://b:2", "--strategy", "leastload"]
    assert cli.main([*argv, "--host", "0.0.0.0", "--port", "0", "--workers", "1"]) == 0
    config = served[0]
    assert (config.server.host, config.server.port, config.server.workers) == ("0.0.0.0", 0, 1)
    assert config.routing.strategy == "leastload"
    assert [backend.name for backend in config.backends] == ["b:2"]


def test_the_exit_code_of_the_gateway_is_the_commands(monkeypatch, served):
    monkeypatch.setattr(sys.modules["router.app"], "run", lambda config, read: 1)
    assert cli.main(["serve", "--backend", "http://a:1"]) == 1


def test_serve_without_file_and_backend_is_a_usage_error(served, capsys):
    assert usage_error(["serve"]) == 2
    assert "--backend" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backend", "a:1"], '--backend: "a:1" (expected '),
        (["--backend", "http://a:1", "--strategy", "foo"], '--strategy: "foo" (expected one of prefixaware, '),
        (["--backend", "http://a:1", "--workers", "2"], "--workers: 2 (expected "),
        (["--backend", "http://a:1", "--port", "70000"], "--port: 70000 (expected "),
        (["-c", "absent.toml"], "absent.toml: No such file or directory (expected "),
    ],
)
def test_wrong_flags_end_with_2_and_a_line(served, capsys, flags, said):
    assert cli.main(["serve", *flags]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(said)
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert not served


@pytest.mark.parametrize(
    "argv", [[], ["foo"], ["serve", "--port", "x"], ["serve", "--foo"], ["check"], ["version", "extra"]]
)
def test_wrong_arguments_end_with_2(argv, capsys):
    assert usage_error(argv) == 2
    assert "usage: kvgate" in capsys.readouterr().err


def test_help_ends_with_0(capsys):
    assert usage_error(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(command in output for command in ("serve", "check", "demo", "sim", "version"))


def test_check_of_a_right_file_says_ok(file, capsys):
    assert cli.main(["check", "-c", str(file)]) == 0
    assert capsys.readouterr().out == "ok\n"


def test_check_names_each_fault_on_a_line_of_stderr_and_ends_with_2(file, capsys):
    file.write_text("[server]\nprot = 1\nport = -1\n")
    assert cli.main(["check", "-c", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.partition(": ")[0] for line in output.err.splitlines()] == ["server.prot", "server.port"]


def test_check_of_broken_toml_names_file_line_and_column(file, capsys):
    file.write_text("[server]\nport 80\n")
    assert cli.main(["check", "-c", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{file}: ")
    assert "line 2, column 6" in error


def test_probe_of_ready_engines_says_what_they_are_and_ok(file, probed, capsys):
    probed.append(Probed("a:1", models=("m",), block_size_tokens=16, num_gpu_blocks=100))
    assert cli.main(["check", "-c", str(file), "--probe"]) == 0
    assert capsys.readouterr().out == "a:1: models m; block size 16 tokens; 100 blocks\nok\n"


def test_probe_with_an_unmet_precondition_names_it_on_stderr_and_ends_with_2(file, probed, capsys):
    probed.append(Probed("a:1", findings=[Finding("a:1", "prefix caching is off", "start it with --foo")]))
    assert cli.main(["check", "-c", str(file), "--probe"]) == 2
    output = capsys.readouterr()
    assert output.err == "a:1: prefix caching is off; start it with --foo\n"
    assert "ok" not in output.out


def test_probe_asks_nobody_where_the_file_is_wrong(file, capsys):
    file.write_text("[server]\nport = -1\n")
    assert cli.main(["check", "-c", str(file), "--probe"]) == 2


@pytest.mark.parametrize(("command", "module_name"), [("sim", "router.sim.cli"), ("demo", "router.sim.demo")])
def test_late_commands_bring_their_own_arguments_and_are_imported_only_when_asked_for(
    monkeypatch, capsys, command, module_name
):
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    assert cli.main(["version"]) == 0
    assert module_name not in sys.modules

    module = ModuleType(module_name)
    module.add_arguments = lambda parser: parser.add_argument("--port", type=int)
    module.run = lambda arguments: arguments.port
    monkeypatch.setitem(sys.modules, module_name, module)
    assert cli.main([command, "--port", "1"]) == 1
    assert usage_error([command, "--foo"]) == 2


def test_an_interrupt_ends_without_a_traceback(monkeypatch, served, capsys):
    def interrupted(config, read):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["router.app"], "run", interrupted)
    assert cli.main(["serve", "--backend", "http://a:1"]) == 0  # ended as asked
    assert capsys.readouterr().err == ""


def test_version_names_version_native_build_and_python(capsys):
    assert cli.main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"kvgate {__version__}"
    assert lines[1].startswith("native ")
    assert lines[-1].startswith("python 3.")


def test_arguments_come_from_the_command_line_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvgate", "version"])
    assert cli.main() == 0


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    command = [sys.executable, "-m", "router", "version"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 1
