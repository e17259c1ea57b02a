"""The engine model compiled by mypyc for the bench alone: the same source, not quite twice as fast.

Built on first use into build/policy-model, in a folder named after the sources, so that it is never older than those.
The gateway's own build leaves the model out: `kvgate sim` runs in real time and has no need of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MODULES: Final = ("block_pool", "engine_model")
SETUP: Final = """
from mypyc.build import mypycify
from setuptools import setup
paths = ["router/sim/block_pool.py", "router/sim/engine_model.py"]
setup(name="policy-model", packages=[],
      ext_modules=mypycify(["--config-file=", *paths], opt_level="2", debug_level="0", group_name="policy_model"))
"""


def use_compiled_model() -> None:
    """Before router.sim.engine_model is imported. RuntimeError where it cannot be built, or comes too late."""
    if any(f"router.sim.{name}" in sys.modules for name in MODULES):
        raise RuntimeError("router.sim.engine_model is imported already")
    folder = _built()
    import router.sim

    sys.path.append(str(folder))  # the library that the two modules share
    router.sim.__path__.insert(0, str(folder / "router" / "sim"))


def _built() -> Path:
    sources = [ROOT / "router" / "sim" / f"{name}.py" for name in MODULES]
    digest = hashlib.sha256(SETUP.encode() + sys.version.encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = ROOT / "build" / "policy-model" / digest.hexdigest()[:16]
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(mkdtemp(dir=folder.parent))
    package = draft / "router" / "sim"
    package.mkdir(parents=True)
    for init in (draft / "router", package):
        (init / "__init__.py").touch()
    for source in sources:
        shutil.copy(source, package)
    (draft / "setup.py").write_text(SETUP)
    print("compiling the engine model, once", file=sys.stderr)
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=draft,
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise RuntimeError(f"mypyc could not compile the engine model (--pure does without):\n{made.stderr[-2000:]}")
    try:
        os.rename(draft, folder)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
    return folder
