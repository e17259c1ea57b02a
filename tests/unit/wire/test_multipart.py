"""Forms are read part by part, within limits, and never believed."""

import pytest

from router.wire.multipart import (
    BOUNDARY_LIMIT_BYTES,
    PART_HEAD_LIMIT_BYTES,
    PARTS_LIMIT,
    MultipartError,
    boundary_of,
    is_multipart,
    read_parts,
)


def text(name: str, value: str) -> bytes:
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def summary(body: bytes, boundary: bytes = b"XX") -> list[tuple[bytes, bytes, bool]]:
    return [(part.name, bytes(part.value), part.is_file) for part in read_parts(body, boundary)]


def test_texts_and_files_come_in_order() -> None:
    body = (
        text("model", "whisper")
        + b'--XX\r\nContent-Type: audio/wav\r\ncontent-disposition: form-data; filename="a.wav"; name=file\r\n\r\n'
        + b"RIFF\r\n\x00--X\r\n"
        + text("language", "")
        + b"--XX--\r\n"
    )
    assert summary(body) == [
        (b"model", b"whisper", False),
        (b"file", b"RIFF\r\n\x00--X", True),
        (b"language", b"", False),
    ]


def test_a_preamble_padding_and_an_epilogue_are_no_parts() -> None:
    body = b'ignore me\r\n--XX \t\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--XX-- \r\n--XX\r\nrest'
    assert summary(body) == [(b"a", b"1", False)]


def test_a_file_is_a_view_into_the_body() -> None:
    body = b"--XX\r\nContent-Disposition: form-data; name=\"f\"; filename*=utf-8''x\r\n\r\nDATA\r\n--XX--"
    (part,) = read_parts(body, b"XX")
    assert isinstance(part.value, memoryview)
    assert part.value.obj is body


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'multipart/form-data ; charset=utf-8; BOUNDARY = "a b;\\"c"', b'a b;"c'),
        (b"multipart/form-data; boundary=first; boundary=second", b"first"),
        (b"multipart/form-data; boundary=" + b"x" * BOUNDARY_LIMIT_BYTES, b"x" * BOUNDARY_LIMIT_BYTES),
    ],
)
def test_the_boundary_comes_from_the_content_type(content_type: bytes, boundary: bytes) -> None:
    assert is_multipart(content_type)
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b'multipart/form-data; boundary="abc',
        b"multipart/form-data; boundary=" + b"x" * (BOUNDARY_LIMIT_BYTES + 1),
    ],
)
def test_a_content_type_without_a_usable_boundary_is_refused(content_type: bytes) -> None:
    with pytest.raises(MultipartError):
        boundary_of(content_type)


@pytest.mark.parametrize("content_type", [b"", b"multipart/mixed; boundary=a", b"application/json", b"form-data"])
def test_other_types_are_no_forms(content_type: bytes) -> None:
    assert not is_multipart(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no boundary at all",
        b"--XX",
        b"--XX\r\n",
        text("a", "1"),  # no closing boundary
        text("a", "1") + b"--XX",
        text("a", "1")[:-2] + b"--XX--",  # the delimiter has no line break of its own
        b"--XXY" + text("a", "1")[4:] + b"--XX--",
        b"--XX junk\r\n" + text("a", "1")[6:] + b"--XX--",
        b"--XX\r\n\r\nno head\r\n\r\n--XX--",
        b"--XX\r\nContent-Disposition: form-data\r\n\r\n1\r\n--XX--",
        b'--XX\r\nContent-Disposition: attachment; name="a"\r\n\r\n1\r\n--XX--',
        b'--XX\r\nContent-Type: text/plain; name="a"\r\n\r\n1\r\n--XX--',
        b'--XX\r\nContent-Disposition: form-data; name="a"\r\n1\r\n--XX--',  # the head has no end
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    with pytest.raises(MultipartError):
        read_parts(body, b"XX")


def test_a_well_formed_form_of_the_same_pieces_is_not_refused() -> None:
    assert summary(text("a", "1") + b"--XX--") == [(b"a", b"1", False)]


def test_no_more_parts_are_read_than_the_limit() -> None:
    full = b"".join(text(f"n{i}", "1") for i in range(PARTS_LIMIT))
    assert len(read_parts(full + b"--XX--", b"XX")) == PARTS_LIMIT
    assert len(read_parts(full + b"--XX broken beyond the limit", b"XX")) == PARTS_LIMIT
    with pytest.raises(MultipartError):
        read_parts(full[: -len(text("n63", "1"))] + b"--XX broken before the limit", b"XX")


def test_a_part_head_of_the_limit_passes_and_one_beyond_is_refused() -> None:
    def body(head_bytes: int) -> bytes:
        head = b'Content-Disposition: form-data; name="a"\r\nX: '
        return b"--XX\r\n" + head.ljust(head_bytes, b"x") + b"\r\n\r\n1\r\n--XX--"

    assert summary(body(PART_HEAD_LIMIT_BYTES)) == [(b"a", b"1", False)]
    with pytest.raises(MultipartError):
        read_parts(body(PART_HEAD_LIMIT_BYTES + 1), b"XX")
