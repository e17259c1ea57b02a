"""A layer imports from the layers left of it, never to the right, and not from its neighbours in one step."""

from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT, imports, module_name, python_files

STEPS: tuple[tuple[str, ...], ...] = (
    ("errors", "clock", "metrics", "build_info", "healthcheck", "tls", "systemd"),
    ("config", "metrics_exporter"),
    ("wire",),
    ("backends",),
    ("index", "net", "learning", "kv_events", "tokens", "l2"),
    ("strategies",),
    ("proxy",),
    ("control", "dashboard", "engine_caches", "kv_probe"),
    ("admin", "tracing"),
    ("app",),
    ("cli",),
    ("__main__",),
)
# Stand beside the steps: what each may import of router, and nothing of router imports them (cli does it by name,
# when asked to, so that a gateway never loads a simulator).
BESIDE: dict[str, tuple[str, ...]] = {"sim": ("wire", "index", "clock")}

# layer -> the native modules that it may import; empty: any.
MAY_IMPORT_NATIVE: dict[str, tuple[str, ...]] = {
    "wire": (),
    "index": (),
    "kv_events": (),
    "strategies": (),
    "sim": (),
    # The end of a body is found once per chunk: both ends of the data path hold that parser itself.
    "net": ("body_framing",),
    "proxy": ("body_framing",),
}
NEVER = ("tests", "loadtest")

# (file, full name of what it imports) -> why it may.
EXCEPTIONS: dict[tuple[str, str], str] = {}

RANK = {layer: rank for rank, step in enumerate(STEPS) for layer in step}


def layer_of(module: str) -> str:
    """The part of router that a module belongs to: its first name below the package; "" is router/__init__.py."""
    return [*module.split("."), ""][1]


def fault(layer: str, imported: str, files: frozenset[str]) -> str | None:
    """Why `layer` may not import this name, None if it may. `files`: the layers that exist."""
    top = imported.split(".")[0]
    if top in NEVER:
        return f"{layer} imports {imported}: the product never needs {top}"
    if top == "native":
        allowed = MAY_IMPORT_NATIVE.get(layer)
        if allowed is not None and (not allowed or ([*imported.split("."), ""][1] in allowed)):
            return None
        return f"{layer} imports {imported}: not in MAY_IMPORT_NATIVE"
    if top != "router":
        return None
    other = layer_of(imported)
    if other == layer or other not in files:  # `from router import __version__`
        return None
    if layer in BESIDE:
        return None if other in BESIDE[layer] else f"{layer} imports {other}: only {BESIDE[layer]} are allowed"
    if other in BESIDE:
        return f"{layer} imports {other}, which nothing imports"
    if layer not in RANK or other not in RANK:
        return f"{layer if layer not in RANK else other} has no place in STEPS"
    if RANK[other] >= RANK[layer]:
        return f"{layer} (step {RANK[layer]}) imports {other} (step {RANK[other]})"
    return None


def faults(root: Path) -> list[str]:
    files = python_files("router", root)
    layers = frozenset(layer_of(module_name(file, root)) for file in files)
    found = []
    for file in files:
        path = str(file.relative_to(root))
        layer = layer_of(module_name(file, root))
        for line, imported in imports(file, root):
            why = fault(layer or "router/__init__.py", imported, layers) if layer else None
            if not layer and imported.split(".")[0] in ("router", "native", *NEVER):
                why = f"router/__init__.py imports {imported}: it is below all layers"
            if why and (path, imported) not in EXCEPTIONS:
                found.append(f"{path}:{line}: {why}")
    return found


def test_imports_go_from_right_to_left():
    assert faults(ROOT) == []


def test_every_exception_is_still_needed():
    used = {(str(file.relative_to(ROOT)), imported) for file in python_files("router") for _, imported in imports(file)}
    assert set(EXCEPTIONS) <= used


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        ("router/wire/http.py", "import router.backends.backend", "wire (step 2) imports backends (step 3)"),
        ("router/wire/http.py", "from router import proxy", "wire (step 2) imports proxy (step 6)"),
        ("router/wire/http.py", "from ..proxy import exchange", "wire (step 2) imports proxy (step 6)"),
        ("router/wire/http.py", "def f():\n    import router.proxy", "wire (step 2) imports proxy (step 6)"),
        ("router/errors.py", "from router.clock import Clock", "errors (step 0) imports clock (step 0)"),
        ("router/index/tree.py", "from router.net import x", "index (step 4) imports net (step 4)"),
        ("router/app.py", "import router.cli", "app (step 9) imports cli (step 10)"),
        ("router/cli.py", "from router.sim import cli", "cli imports sim, which nothing imports"),
        ("router/sim/server.py", "from router.errors import RouterError", "sim imports errors: only"),
        ("router/odd.py", "import router.errors", "odd has no place in STEPS"),
        (
            "router/proxy/exchange.py",
            "import native.block_hash",
            "proxy imports native.block_hash: not in MAY_IMPORT_NATIVE",
        ),
        (
            "router/proxy/exchange.py",
            "from native import block_hash",
            "proxy imports native.block_hash: not in MAY_IMPORT_NATIVE",
        ),
        ("router/app.py", "import native", "app imports native: not in MAY_IMPORT_NATIVE"),
        ("router/app.py", "from tests.support import x", "app imports tests.support.x: the product never"),
        ("router/app.py", "import loadtest", "app imports loadtest: the product never"),
        ("router/__init__.py", "from router.errors import RouterError", "it is below all layers"),
    ],
)
def test_a_wrong_import_is_found_with_file_line_and_layer(tmp_path, file, source, why):
    for layer in (*RANK, *BESIDE):
        (tmp_path / "router" / layer).mkdir(parents=True)
        (tmp_path / "router" / layer / "x.py").write_text("")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source + "\n")
    (only,) = faults(tmp_path)
    assert only.startswith(f"{file}:{source.count(chr(10)) + 1}: ")
    assert why in only


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("router/wire/http.py", "from router.errors import RouterError\nfrom native.block_hash import BlockHashes"),
        ("router/wire/http.py", "from . import sse\nfrom .. import clock\nimport asyncio, router.config"),
        ("router/sim/server.py", "from router.wire import sse\nfrom router.clock import Clock\nimport native"),
        ("router/net/upstream.py", "from native.body_framing import BodyFramer"),
        ("router/cli.py", "from router import __version__, app"),
    ],
)
def test_right_imports_pass(tmp_path, file, source):
    for layer in (*RANK, *BESIDE):
        (tmp_path / "router" / layer).mkdir(parents=True)
        (tmp_path / "router" / layer / "x.py").write_text("")
    (tmp_path / file).write_text(source + "\n")
    assert faults(tmp_path) == []
