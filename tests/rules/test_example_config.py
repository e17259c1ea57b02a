"""config.example.toml and router/config.py name the same keys with the same defaults."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from router.config import NOT_BUILT, Config, key_paths, parse
from tests.support.certificates import make_certificates

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"
# Tables whose keys are the operator's own.
FREE_TABLES = ("models.aliases", "models.tokenizers")

OPTIONAL_LINE = re.compile(r'# ((?:\[\[?[a-z_.]+\]\]?|(?:[a-z0-9_]+|"[^"]+") = .*))')


def uncommented(text: str) -> str:
    """The example with its optional lines switched on."""
    return "\n".join(OPTIONAL_LINE.sub(r"\1", line) if OPTIONAL_LINE.match(line) else line for line in text.split("\n"))


def flattened(document: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in document.items():
        path = prefix + key
        if path in FREE_TABLES:
            flat[path] = value
        elif isinstance(value, dict):
            flat.update(flattened(value, path + "."))
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                flat.update(flattened(item, path + "."))
        else:
            flat[path] = value
    return flat


def as_toml(default: object) -> object:
    return list(default) if isinstance(default, tuple) else default


@pytest.fixture(scope="module")
def text() -> str:
    return EXAMPLE.read_text()


def test_the_example_as_it_stands_is_the_default_configuration(text):
    assert parse(text.encode(), environ={}) == Config()


def test_every_key_of_the_code_stands_in_the_example_and_no_other(text):
    assert set(flattened(tomllib.loads(uncommented(text)))) == {path for path, _ in key_paths()}


def test_every_default_of_the_code_is_set_in_the_example(text):
    given = flattened(tomllib.loads(text))
    for path, default in key_paths():
        if default is None or path.startswith("backends."):
            assert path not in given, f"{path} is absent by default: write it as a comment"
        else:
            assert given[path] == as_toml(default), path


def test_defaults_of_optional_tables_are_shown_too(text):
    shown = flattened(tomllib.loads(uncommented(text)))
    by_path = dict(key_paths())
    assert shown["backends.weight"] == by_path["backends.weight"]
    assert shown["backends.kv_events"] == by_path["backends.kv_events"]


def test_every_optional_example_is_one_that_the_code_accepts_or_calls_not_built(text, tmp_path):
    document = tomllib.loads(uncommented(text))
    made = make_certificates(tmp_path)
    (tmp_path / "keys").write_text("somebody:key")
    document["server"] |= {"tls_cert": str(made.cert), "tls_key": str(made.key)}
    document["backends"][0] |= {"url": "https://10.0.0.7:8000", "tls_ca": str(made.ca)}
    (tmp_path / "tokenizer.json").write_text("{}")
    document["routing"]["kvaware"]["tokenizer"] = str(tmp_path)
    document["models"]["tokenizers"] = dict.fromkeys(document["models"]["tokenizers"], str(tmp_path))
    document["auth"]["api_keys_file"] = str(tmp_path / "keys")
    document["kv_cache"] |= {"l2": "rediss://10.0.0.9:6379/0", "l2_tls_ca": str(made.ca)}
    for path in NOT_BUILT:
        *tables, key = path.split(".")
        place = document
        for table in tables:
            place = place[table]
            place = place[0] if isinstance(place, list) else place
        default = dict(key_paths())[path]
        if default is None or isinstance(default, dict):
            del place[key]
    environ = {
        "ENGINE_KEY": "secret",
        "L2_PASSWORD": "word",
        "KVGATE_ADMIN_TOKEN": "token",
        "OTLP_HEADERS": "authorization=x",
    }
    config = parse(document, environ=environ)
    assert config.backends[0].name == "gpu-0"
    assert config.backends[0].api_key == "secret"


def test_what_is_not_built_yet_says_so_beside_its_key(text):
    lines = text.split("\n")
    for path in NOT_BUILT:
        key = path.rpartition(".")[2]
        table = path.rpartition(".")[0]
        if path in FREE_TABLES:
            pattern = rf"\[{re.escape(path)}\].*[Nn]ot built yet"
            assert any(re.match(pattern, line) for line in lines), path
            continue
        assert any(re.match(rf"(# )?{key} = .*[Nn]ot built yet", line) for line in lines), f"{path} in [{table}]"


def test_every_line_with_a_key_explains_it(text):
    for line in text.split("\n"):
        shown = OPTIONAL_LINE.sub(r"\1", line)
        if re.match(r"[a-z0-9_]+ = ", shown):
            assert re.search(r"  # \S", shown), f"no comment: {line}"


def test_keys_are_in_the_order_of_the_code(text):
    shown = list(flattened(tomllib.loads(uncommented(text))))
    assert shown == [path for path, _ in key_paths()]


def test_the_tables_of_not_built_keys_exist():
    assert set(NOT_BUILT) <= {path for path, _ in key_paths()}


def test_defaults_are_immutable_or_fresh():
    assert Config().models.aliases is not Config().models.aliases
    for _, default in key_paths():
        assert default is dataclasses.MISSING or isinstance(default, str | int | float | tuple | dict | None)
