"""Programs of Debian that tests use and pip cannot bring. `.ci/test-tools` installs them; the list is there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

LIST = Path(__file__).parents[2] / ".ci" / "test-tools"


def packages() -> dict[str, str]:
    """Program -> the Debian package that has it."""
    return dict(re.findall(r"^ +\[([\w-]+)\]=([\w.+-]+)$", LIST.read_text(), re.MULTILINE))


def program(name: str) -> str:
    """The program's path. Without it the test is skipped with what to install; in CI it fails (KVGATE_NO_SKIPS=1)."""
    package = packages()[name]
    path = shutil.which(name)
    if path is None:
        reason = f"needs {name}: apt-get install {package}"
        if os.environ.get("KVGATE_NO_SKIPS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path
