"""router/build_info.py: what `kvgate version` can tell of a compiled file, and what it says without one."""

import pytest

from router import build_info


@pytest.mark.parametrize(
    ("binary", "traits"),
    [
        (b"\x7fELF..GCC: (Debian 12.2.0-14) 12.2.0\0..", ["GCC: (Debian 12.2.0-14) 12.2.0"]),
        (b"\x7fELF..clang version 17.0.6\0", ["clang version 17.0.6"]),
        (b"GCC: (GNU) 13.1.0\0.debug_info\0", ["GCC: (GNU) 13.1.0", "debug symbols"]),
        (b"\0__asan_init\0__ubsan_handle_add\0", ["address sanitizer", "undefined-behaviour sanitizer"]),
        (b"", []),
    ],
)
def test_traits_are_read_from_the_file_itself(binary, traits):
    assert build_info.build_traits(binary) == traits


def test_every_native_module_of_this_tree_is_listed():
    listed = [line.split()[1].partition(".")[0] for line in build_info.lines() if line.startswith("native ")]
    assert listed == sorted(listed)
    assert "block_hash" in listed


def test_a_missing_native_build_is_said(monkeypatch):
    monkeypatch.setattr(build_info, "EXTENSION_SUFFIXES", [".of-another-abi.so"])
    assert any(line.startswith("native missing: ") for line in build_info.lines())
