"""What is learned from keys, and what is not taken for one."""

from __future__ import annotations

import pytest

from router.l2.key_layout import KEY_LIMIT_BYTES, Form, Layout, Unread, read_key, salt_suffix

HASH = "-1e9a9b550ec7febe"
DIGEST = "5d7c605550abfe32390ca96346fc78be550a33ce6dc8151d1a9da07ecebc490b"


@pytest.mark.parametrize(
    ("key", "form", "model", "rebuilt"),
    [
        # redis:// stores two keys a chunk; the one that LMCache itself asks for is metadata's
        (f"org/model@1@0@{HASH}@bfloat16metadata", "in-process", "org/model", "org/model@1@0@H@bfloat16metadata"),
        # resp://, valkey:// and others one
        (f"org/model@1@0@{HASH}@fp8_e4m3fnuz", "in-process", "org/model", "org/model@1@0@H@fp8_e4m3fnuz"),
        ("/models/a b@16@15@5f39880479f4a20@half", "in-process", "/models/a b", "/models/a b@16@0@H@half"),
        (f"m@2@1@{HASH}@uint8@31metadata", "in-process", "m", "m@2@0@H@uint8@0metadata"),
        (f"m@2@1@{HASH}@float@31", "in-process", "m", "m@2@0@H@float@0"),
        (f"org/model@01000100@0@{DIGEST}", "multi-process", "org/model", "org/model@01000100@0@H"),
        (f"m@08030803@1a@{DIGEST}", "multi-process", "m", "m@08000800@1a@H"),
        (f"m@01000100@0@{DIGEST}@tenant 7", "multi-process", "m", "m@01000100@0@H"),
        (f"prod@m@01000100@0@{DIGEST}", "multi-process", "m", "prod@m@01000100@0@H"),
    ],
)
def test_a_key_of_lmcache_gives_its_layout(key: str, form: str, model: str, rebuilt: str) -> None:
    layout = read_key(key.encode())
    assert isinstance(layout, Layout)
    assert (layout.form, layout.model) == (form, model)
    assert layout.key(b"H", b"") == rebuilt.encode()


def test_both_keys_of_a_pair_give_the_layout_of_the_one_that_is_asked_for() -> None:
    pair = read_key(f"m@1@0@{HASH}@halfmetadata".encode())
    value = read_key(f"m@1@0@{HASH}@halfkv_bytes".encode())
    assert pair == value


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"session:42",
        b"\xff\xfe@1@0@1f@half",
        f"m@1@0@{HASH}".encode(),
        f"m@1@1@{HASH}@half".encode(),  # worker 1 of 1
        f"m@0@0@{HASH}@half".encode(),
        f"m@1@0@{HASH}@quarter".encode(),
        f"m@1@0@{HASH}@half\n".encode(),
        f"m\n@1@0@{HASH}@half".encode(),
        f"m@1@0@{HASH.upper()}@half".encode(),
        f"@1@0@{HASH}@half".encode(),
        f"m@1000100@0@{DIGEST}".encode(),
        f"m@01000100@0@{DIGEST}@a@b".encode(),
        b"m" * KEY_LIMIT_BYTES + f"@1@0@{HASH}@half".encode(),
    ],
)
def test_anything_else_teaches_nothing(key: bytes) -> None:
    assert read_key(key) is Unread.OTHER


def test_tags_of_a_request_are_known_for_what_they_are() -> None:
    for suffix in ("", "metadata", "kv_bytes"):
        assert read_key(f"m@1@0@{HASH}@half@user%7@x%{suffix}".encode()) is Unread.TAGGED


def test_a_model_that_looks_like_a_field_does_not_confuse() -> None:
    layout = read_key(f"01000100@m@01000100@0@{DIGEST}".encode())
    assert isinstance(layout, Layout)
    assert layout.model == "m"


@pytest.mark.parametrize(
    ("salt", "suffix"),
    [(None, b""), ("", b""), ("tenant", b"@tenant"), ("ü", "@ü".encode())]
    + [(bad, None) for bad in ("a@b", "a/b", "a\\b", "a\0b", "x" * 129)],
)
def test_salts_go_behind_a_key_or_have_none(salt: str | None, suffix: bytes | None) -> None:
    assert salt_suffix(salt) == suffix


def test_half_of_a_surrogate_pair_is_no_reason_to_fail() -> None:
    assert salt_suffix("\ud800") is not None


def test_forms_are_words_for_people() -> None:
    assert [str(form) for form in Form] == ["in-process", "multi-process"]
