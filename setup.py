"""The native extensions: every native/*.pyx is one.

Switches (environment): KVGATE_DEBUG=1 turns on bounds checks and C asserts, KVGATE_COVERAGE=1 line tracing.
Sanitizer flags come through CFLAGS and LDFLAGS (see .ci/sanitize).
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("KVGATE_DEBUG") == "1"
COVERAGE = os.environ.get("KVGATE_COVERAGE") == "1"
CHECKED = DEBUG or COVERAGE

compile_args = ["-O1", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g0"]
macros = [("CYTHON_TRACE_NOGIL", "1")] if COVERAGE else []

extensions = [
    Extension(
        f"native.{path.stem}",
        [str(path)],
        extra_compile_args=[
            *compile_args,
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-missing-field-initializers",
        ],
        define_macros=macros,
    )
    for path in sorted(Path("native").glob("*.pyx"))
]

setup(
    ext_modules=cythonize(
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
)
