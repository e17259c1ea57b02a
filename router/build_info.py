"""What this installation is made of, for `kvgate version` and bug reports."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from router import __version__


def lines() -> Iterator[str]:
    """Version, one line per native module with what its file tells of the build, Python."""
    yield f"kvgate {__version__}"
    modules = sorted(_extension_files())
    for file in modules:
        yield f"native {file.name} ({', '.join(build_traits(file.read_bytes())) or 'compiler unknown'})"
    if not modules:
        yield "native missing: build it with `pip install .` (needs a C compiler and Python's headers)"
    path = "compiled" if request_path_compiled() else "interpreted: slower, see KVGATE_PURE in setup.py"
    yield f"request path {path}"
    yield f"python {platform.python_version()} ({platform.python_implementation()}, {platform.machine()})"


def request_path_compiled() -> bool:
    """Whether the modules that run for every request were compiled (pyproject.toml, request-path)."""
    spec = importlib.util.find_spec("router.proxy.exchange")
    return spec is not None and spec.origin is not None and spec.origin.endswith(tuple(EXTENSION_SUFFIXES))


def build_traits(binary: bytes) -> list[str]:
    """Compiler and unusual switches, as far as the compiled file itself shows them."""
    compiler = re.search(rb"GCC: \([^)\0]*\) [0-9.]+|clang version [0-9.]+", binary)
    traits = [compiler[0].decode("ascii", "replace")] if compiler else []
    if b".debug_info\0" in binary:
        traits.append("debug symbols")
    if b"__asan_init" in binary:
        traits.append("address sanitizer")
    if b"__ubsan_handle" in binary:
        traits.append("undefined-behaviour sanitizer")
    return traits


def _extension_files() -> Iterator[Path]:
    """Those that this Python would load: a file of another version's ABI does not count."""
    spec = importlib.util.find_spec("native")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in Path(folder).iterdir():
            if any(file.name.endswith(suffix) for suffix in EXTENSION_SUFFIXES):
                yield file
