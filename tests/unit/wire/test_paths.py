"""What may be repeated is decided by method and path together."""

from __future__ import annotations

import pytest

from router.wire.paths import PathKind, path_kind


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
        b"/invocations",
    ],
)
def test_inference_is_a_post_to_a_known_path(path: bytes) -> None:
    assert path_kind(b"POST", path) is PathKind.INFERENCE
    assert path_kind(b"GET", path) is PathKind.READ
    assert path_kind(b"PUT", path) is PathKind.CHANGE


@pytest.mark.parametrize(
    "path",
    [
        b"/sleep",
        b"/wake_up",
        b"/reset_prefix_cache",
        b"/v1/load_lora_adapter",
        b"/v1/unload_lora_adapter",
        b"/unknown",
        b"/v1/chat/completions/",
        b"/v1/Chat/completions",
    ],
)
def test_every_other_post_may_change_something(path: bytes) -> None:
    assert path_kind(b"POST", path) is PathKind.CHANGE


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
def test_reading_methods_change_nothing(method: bytes) -> None:
    assert path_kind(method, b"/version") is PathKind.READ
