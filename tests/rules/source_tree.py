"""What the rules read: the repository's files, and the imports of a Python file with their lines."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_files(folder: str, root: Path = ROOT) -> list[Path]:
    files = sorted((root / folder).rglob("*.py"))
    assert files, f"no Python files below {folder}"
    return files


def tracked_files() -> list[Path]:
    """Those that git tracks or would track; without git (an unpacked archive) all but what a build leaves."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        left = {".venv", "build", "dist", ".git", ".state", "__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache"}
        files = [file for file in ROOT.rglob("*") if not left & set(file.relative_to(ROOT).parts)]
    return [file for file in files if file.is_file()]


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def module_name(file: Path, root: Path = ROOT) -> str:
    parts = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything imported, wherever in the file: `from a import b` gives `a.b`."""
    package = module_name(file, root).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
