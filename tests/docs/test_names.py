"""What README.md and docs/ name is there: files, headings, configuration keys, metrics, endpoints, commands, flags."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from router import cli, config
from tests.docs.pages import ROOT, Page, commands, pages
from tests.docs.settings import environment_names, localized
from tests.docs.test_commands import is_run
from tests.support.gateway_process import Figures, GatewayProcess, running_gateway
from tests.support.sim_process import running_sim

PAGES = pages()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# -- links

_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Page) -> None:
    broken = []
    for link in _LINK.findall(page.prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.path.parent / file).resolve() if file else page.path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    known = {page.path: page for page in PAGES}
    while todo:
        path = todo.pop()
        if path in reached or path not in known:
            continue
        reached.add(path)
        links = (link.partition("#")[0] for link in _LINK.findall(known[path].prose))
        for link in filter(None, links):
            target = (path.parent / link).resolve()
            todo += sorted(target.glob("*.md")) if target.is_dir() else [target]
    assert set(known) - reached == set()


# -- configuration


def key_paths(table: type, prefix: str = "") -> Iterator[str]:
    """Of every table, and of every key that a file may hold."""
    hints = get_type_hints(table)
    for field in fields(table):
        path = f"{prefix}{field.name}"
        inner = hints[field.name]
        if is_dataclass(inner):
            yield path
            yield from key_paths(inner, f"{path}.")  # type: ignore[arg-type]
        elif "tables" in field.metadata:
            yield path
            yield from key_paths(field.metadata["tables"], f"{path}.")
        elif "rule" in field.metadata:
            yield path


NOT_KEYS = {"server.address": "an attribute of spans"}
KEYS = frozenset(key_paths(config.Config))
TABLES = frozenset(path.partition(".")[0] for path in KEYS)


def test_key_paths_are_those_of_the_file() -> None:
    assert {"server.port", "routing.session.headers", "backends.url", "models.aliases"} <= KEYS
    assert "admin.token" not in KEYS


@each_page
def test_configuration_keys_exist(page: Page) -> None:
    wrong = []
    for span in page.code_spans():
        for table in re.findall(r"^\[\[?([a-z_.]+)\]\]?", span):
            if table not in KEYS:
                wrong.append(span)
        path = re.match(r"([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?: *=.*)?$", span)
        if (
            path
            and path[1].partition(".")[0] in TABLES
            and path[1] not in KEYS | NOT_KEYS.keys()
            and not _is_file(path[1])
        ):
            wrong.append(span)
    assert wrong == []


def _is_file(name: str) -> bool:
    return name.endswith((".py", ".toml", ".md"))


@each_page
def test_configurations_pass_the_check(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in page.blocks:
        if block.language != "toml":
            continue
        for name in environment_names(block.text):
            monkeypatch.setenv(name, "x")
        for key in re.findall(r'^\s*#? ?\w+_(?:file|cert|key|ca) = "([^"/][^"]*)"', block.text, re.MULTILINE):
            (tmp_path / key).write_text("alice:a-key\n")
        monkeypatch.chdir(tmp_path)
        file = tmp_path / "kvgate.toml"
        file.write_text(localized(block.text, {}, tmp_path))
        try:
            config.load(str(file))
        except config.ConfigError as error:
            pytest.fail(f"{page.name}:{block.line}: {error}")


# -- commands


def parsed(arguments: list[str]) -> str:
    """Why kvgate refuses these arguments; empty if it does not."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            cli._parser(arguments).parse_args(arguments)
        except SystemExit as end:
            incomplete = "the following arguments are required" in told.getvalue()  # as prose may name a command
            return "" if end.code == 0 or incomplete else told.getvalue()
    return ""


def uses_of_kvgate(text: str) -> Iterator[list[str]]:
    """The arguments of each `kvgate` in a command, those of the image among them."""
    for part in re.split(r"[|;&]|\$\(", text.replace("\\\n", " ")):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue
        for at, word in enumerate(words):
            if word.rpartition("/")[2] == "kvgate" and at in (0, 1):
                yield words[at + 1 :]
            elif re.fullmatch(r"kvgate:[0-9.]+", word) and words[:2] == ["docker", "run"]:
                yield ["serve", *words[at + 1 :]]


@each_page
def test_commands_and_flags_of_kvgate_exist(page: Page) -> None:
    texts = [command.text for block in page.blocks if block.language == "console" for command in commands(block)]
    texts += [span for span in page.code_spans() if span.startswith("kvgate ")]
    refused = {text: parsed(words) for text in texts for words in uses_of_kvgate(text) if words}
    assert {text: why for text, why in refused.items() if why} == {}


def test_a_flag_that_does_not_exist_is_found() -> None:
    assert "--no-such-flag" in parsed(["serve", "--no-such-flag"])
    assert list(uses_of_kvgate("docker run -p 1:1 kvgate:0.1.0 --backend X")) == [["serve", "--backend", "X"]]


@each_page
def test_targets_and_files_of_commands_that_are_not_run_exist(page: Page) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong = [
        span for span in page.code_spans() if (made := re.match(r"make ([a-z-]+)", span)) and made[1] not in targets
    ]
    for block in page.blocks:
        for command in commands(block) if block.language == "console" else ():
            if is_run(command):
                continue
            words = shlex.split(command.text, comments=True)
            if words[:2] == ["kubectl", "rollout"]:
                continue  # names of a cluster
            wrong += [
                f"{command.text}: {word}"
                for word in words
                if word.startswith(("deploy/", "loadtest/", "config.")) and not (ROOT / word.rstrip("/")).exists()
            ]
    assert wrong == []


# -- metrics and endpoints: of a gateway that runs


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with running_sim("--served-model-name", model) as engine, running_gateway([engine.url]) as running:
        assert running.request("POST", "/v1/chat/completions", body).status == 200
        yield running


@each_page
def test_metrics_exist(page: Page, gateway: GatewayProcess) -> None:
    named = {
        name
        for text in (page.prose, *(block.text for block in page.blocks))
        for name in re.findall(r"\bkvgate_[a-z_]*[a-z]\b(?!\.)", text)
    }
    if not named:
        return
    text = gateway.admin("GET", "/metrics").body.decode()
    declared = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) | set(Figures(text).samples)
    assert {name for name in named if name not in declared and f"{name}_total" not in declared} == set()


_ENDPOINT = re.compile(r"(GET|POST|DELETE) (/[^\s`{},]*)(?: \{.*\})?")


def endpoint_exists(gateway: GatewayProcess, method: str, path: str) -> bool:
    """On one of the two ports. A name of no backend keeps this from changing anything: the refusal then tells of it."""
    path = path.replace("NAME", "no-such-backend")
    for ask in (gateway.admin, gateway.request):
        response: Any = ask(method, path, {} if method == "POST" else None)
        code = (response.json().get("error") or {}).get("code") if response.headers.get("x-kvgate-error") else None
        if response.status not in (404, 405) or code in ("backend_not_found", "model_not_found"):
            return True
    return False


def test_endpoints_are_answered(gateway: GatewayProcess) -> None:
    named = {
        (found[1], found[2].partition("?")[0])
        for page in PAGES
        for span in page.code_spans()
        if (found := _ENDPOINT.fullmatch(span))
    }
    assert len(named) > 10
    assert {f"{method} {path}" for method, path in named if not endpoint_exists(gateway, method, path)} == set()


def test_an_endpoint_that_is_not_there_is_found(gateway: GatewayProcess) -> None:
    assert not endpoint_exists(gateway, "GET", "/no-such-path")
