"""What is published, as it lies in build/dist: the source archive, the wheel, and the wheel in an empty environment.

Not named test_*: it needs a build of some minutes, so `make package` runs it, and `make test` does not.
"""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT, tracked_files
from tests.support import gateway_process
from tests.support.sim_process import running_sim

DIST = ROOT / "build" / "dist"
SOURCES = {str(file.relative_to(ROOT)) for file in tracked_files()}


@pytest.fixture(scope="module")
def wheel() -> Path:
    (file,) = DIST.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def in_wheel(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def in_archive() -> set[str]:
    (file,) = DIST.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel and what it asks for; its bin folder."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    return folder / "bin"


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Outside of the checkout, so that nothing is imported from it."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVGATE"))}
    return subprocess.run(command, check=False, cwd=folder, env=outside, capture_output=True, text=True, timeout=60)


def test_the_wheel_brings_the_two_packages_and_nothing_beside_them(in_wheel):
    assert {name.split("/")[0] for name in in_wheel if ".dist-info/" not in name} == {"router", "native"}


def test_every_file_of_the_packages_is_in_the_wheel(in_wheel):
    wanted = {name for name in SOURCES if name.startswith(("router/", "native/")) and not name.endswith(".pyx")}
    assert wanted - in_wheel == set()
    assert {"router/py.typed", "native/py.typed", "native/prefix_tree.pyi", "native/prefix_tree.pxd"} <= in_wheel


def test_nothing_but_sources_and_what_was_compiled_from_them_is_in_the_wheel(in_wheel):
    others = {name for name in in_wheel - SOURCES if ".dist-info/" not in name}
    assert {name for name in others if not name.endswith(".so")} == set()
    stems = {name.split(".")[0] for name in others}
    # The one file that is no module's: all of the request path, which its modules' own small files lead to.
    assert {stem for stem in stems if not {f"{stem}.py", f"{stem}.pyx"} & SOURCES} == {"router/request_path__mypyc"}


def test_every_native_source_is_compiled_in_the_wheel(in_wheel):
    compiled = {name.split(".")[0] for name in in_wheel if name.endswith(".so")}
    assert {name.removesuffix(".pyx") for name in SOURCES if name.endswith(".pyx")} <= compiled
    assert "router/proxy/exchange" in compiled


def test_the_wheel_tells_its_licence_and_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"tokenizers", "otel", "lmcache"}


def test_the_source_archive_holds_sources_and_no_generated_c(in_archive):
    wanted = {name for name in SOURCES if name.startswith(("router/", "native/"))}
    assert wanted - in_archive == set()
    assert {"setup.py", "pyproject.toml", "LICENSE", "config.example.toml"} <= in_archive
    assert {name for name in in_archive if name.endswith((".c", ".cpp", ".so", ".pyc"))} == set()
    assert {name for name in in_archive if name.startswith(("tests", "loadtest", ".ci"))} == set()


def test_the_installed_command_tells_that_it_is_compiled(environment, tmp_path):
    done = run(environment / "kvgate", "version", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "native missing" not in done.stdout
    assert "request path compiled" in done.stdout


def test_nothing_is_imported_from_elsewhere(environment, tmp_path):
    script = "import native.prefix_tree, router.proxy.exchange as e; print(native.prefix_tree.__file__, e.__file__)"
    done = run(environment / "python", "-c", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for file in done.stdout.split():
        assert file.startswith(str(environment.parent))
        assert file.endswith(".so")


def test_its_dependencies_agree(environment, tmp_path):
    done = run(environment / "python", "-m", "pip", "check", folder=tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_installed_gateway_serves(environment, tmp_path, monkeypatch):
    command = str(environment / "kvgate")
    monkeypatch.setattr(gateway_process, "serve_command", lambda *arguments: [command, "serve", *arguments])
    monkeypatch.chdir(tmp_path)
    with running_sim("--served-model-name", "m") as sim, gateway_process.running_gateway([sim.url]) as gateway:
        executable = Path(f"/proc/{gateway.process.pid}/cmdline").read_text().split("\0")
        assert command in executable
        body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
        answer = gateway.request("POST", "/v1/chat/completions", body)
        assert answer.status == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert answer.headers["x-kvgate-backend"] == "gpu-0"
        assert gateway.stop() == 0


def test_a_type_checker_believes_the_installed_annotations(environment, tmp_path):
    """Without py.typed all would be Any, and nothing wrong."""
    lines = ["from native.prefix_tree import PrefixTree", "def f(tree: PrefixTree) -> str:", "    return len(tree)"]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    done = run(sys.executable, "-m", "mypy", "--python-executable", environment / "python", "user.py", folder=tmp_path)
    assert 'user.py:3: error: Incompatible return value type (got "int", expected "str")' in done.stdout, done.stdout
