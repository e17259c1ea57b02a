"""The compiled modules are the ones in use: there is no quiet way back to something slower."""

import ast
import importlib
import os
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT, imports, parsed, python_files

SOURCES = sorted((ROOT / "native").glob("*.pyx"))
PATTERNS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvgate"]["request-path"]
REQUEST_PATH = [source for pattern in PATTERNS for source in sorted(ROOT.glob(pattern))]


def test_there_are_native_modules():
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_native_source_is_compiled_and_loaded_from_this_tree(source):
    module = importlib.import_module(f"native.{source.stem}")
    assert isinstance(module.__spec__.loader, ExtensionFileLoader)
    assert module.__file__.endswith(tuple(EXTENSION_SUFFIXES))
    assert Path(module.__file__).resolve().parent == (ROOT / "native").resolve()


PURE = "1" in (os.environ.get("KVGATE_PURE"), os.environ.get("KVGATE_DEBUG"), os.environ.get("KVGATE_COVERAGE"))


@pytest.mark.parametrize("source", REQUEST_PATH, ids=lambda source: str(source.relative_to(ROOT)))
def test_the_request_path_runs_compiled_and_from_its_present_source(source):
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name)
    compiled = module.__file__.endswith(tuple(EXTENSION_SUFFIXES))
    assert compiled is not PURE
    if compiled:
        shared = next(ROOT.glob("router/request_path__mypyc*.so"))
        assert shared.stat().st_mtime >= source.stat().st_mtime, f"{source.name} was changed since it was compiled"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_native_source_has_its_typed_face(source):
    face = source.with_suffix(".pyi")
    assert face.is_file()
    assert ast.get_docstring(ast.parse(face.read_text())), f"{face.name} says nothing about the module"


def guarded_imports(tree: ast.Module) -> list[int]:
    """Lines of `try:` blocks that import native code and go on without it."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for inner in node.body
        if (isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == "native")
        or (isinstance(inner, ast.Import) and any(alias.name.split(".")[0] == "native" for alias in inner.names))
    ]


def test_no_import_of_native_code_is_guarded():
    assert [
        f"{file.relative_to(ROOT)}:{line}" for file in python_files("router") for line in guarded_imports(parsed(file))
    ] == []


@pytest.mark.parametrize("line", ["import native.block_hash", "from native import block_hash"])
def test_a_guarded_import_is_found(line):
    assert guarded_imports(ast.parse(f"try:\n    {line}\nexcept ImportError:\n    pass")) == [1]
    assert guarded_imports(ast.parse(line)) == []


def test_only_the_index_itself_knows_the_slow_reference():
    assert [
        f"{file.relative_to(ROOT)}:{line}"
        for file in python_files("router")
        for line, imported in imports(file)
        if imported.startswith("router.index.reference") and file.parent.name != "index"
    ] == []
