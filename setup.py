"""What is compiled: every native/*.pyx by Cython, and the modules of the request path by mypyc.

Switches (environment):
KVGATE_DEBUG=1     bounds checks and C asserts in native/
KVGATE_COVERAGE=1  line tracing in native/
KVGATE_PURE=1      no mypyc: the request path runs from its Python source, which costs half as much CPU again
                   (docs/decisions/0002-compiled-request-path.md). Implied by the two above.
Sanitizer flags come through CFLAGS and LDFLAGS (see .ci/sanitize).
"""

import os
import tomllib
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("KVGATE_DEBUG") == "1"
COVERAGE = os.environ.get("KVGATE_COVERAGE") == "1"
CHECKED = DEBUG or COVERAGE
PURE = CHECKED or os.environ.get("KVGATE_PURE") == "1"


def sources(pattern: str) -> list[str]:
    """An archive that lacks a source must not build into a package that lacks a module."""
    found = [str(path) for path in sorted(Path().glob(pattern))]
    if not found:
        raise SystemExit(f"setup.py: nothing matches {pattern}")
    return found


# Compiled as one group, so that calls between them are C calls. Plain typed Python: each runs from its source too.
with open("pyproject.toml", "rb") as file:
    PATTERNS = tomllib.load(file)["tool"]["kvgate"]["request-path"]
    REQUEST_PATH = [path for pattern in PATTERNS for path in sources(pattern)]

compile_args = ["-O1", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g0"]
warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
macros = [("CYTHON_TRACE_NOGIL", "1")] if COVERAGE else []


def native() -> list[Extension]:
    extensions = [
        Extension(
            f"native.{Path(path).stem}", [path], extra_compile_args=[*compile_args, *warnings], define_macros=macros
        )
        for path in sources("native/*.pyx")
    ]
    return cythonize(
        extensions,
        language_level=3,
        annotate=DEBUG,
        compiler_directives={
            "boundscheck": CHECKED,
            "wraparound": CHECKED,
            "initializedcheck": CHECKED,
            "auto_pickle": False,
            "cdivision": True,
            "linetrace": COVERAGE,
            "embedsignature": False,
        },
    )


def request_path() -> list[Extension]:
    if PURE:
        return []
    from mypyc.build import mypycify

    # Types are checked by `make check`; a build environment holds no run-time dependencies to check them against.
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    return mypycify([*options, *REQUEST_PATH], opt_level="2", debug_level="0", group_name="router.request_path")


setup(ext_modules=[*native(), *request_path()])
