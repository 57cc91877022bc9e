"""The field of a form that routes it: found where it stands, in time linear in the form."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.api.upstream.envelope import MAX_PART_HEAD_BYTES, MAX_VALUE_BYTES, form_field

TYPE = b"multipart/form-data; boundary=edge"
#: A file whose content looks like the field.
DECOY = b'Content-Disposition: form-data; name="model"\r\n\r\ndecoy'


def part(disposition: bytes, content: bytes, *more: bytes) -> bytes:
    lines = [b"--edge", b"Content-Disposition: form-data; " + disposition, *more, b"", content]
    return b"\r\n".join(lines) + b"\r\n"


def whole(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--edge--\r\n"


@pytest.mark.parametrize("name", [b'name="model"', b"name=model", b'NAME="model"'])
@pytest.mark.parametrize("more", [(), (b"Content-Type: text/plain",)])
def test_the_field_is_found(name: bytes, more: tuple[bytes, ...]) -> None:
    file = part(b'name="file"; filename="model"', DECOY, b"Content-Type: audio/wav")
    assert form_field(TYPE, whole(file, part(name, b"whisper-1", *more)), b"model") == "whisper-1"
    assert form_field(TYPE, b"preamble\r\n" + whole(part(name, b"w")), b"model") == "w"


@pytest.mark.parametrize("content_type", [TYPE + b"; charset=x", TYPE.replace(b"edge", b'"edge"')])
def test_ways_to_write_the_boundary(content_type: bytes) -> None:
    assert form_field(content_type, whole(part(b'name="model"', b"m")), b"model") == "m"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        whole(),
        whole(part(b'name="other"', DECOY)),
        part(b'name="model"', b"m"),
        b'--edge\r\nContent-Disposition: form-data; name="model"\r\n--edge--\r\n',
        whole(part(b'name="model"', b"m", b"x: " + b"y" * MAX_PART_HEAD_BYTES)),
    ],
)
def test_no_field(body: bytes) -> None:
    assert form_field(TYPE, body, b"model") is None
    assert form_field(b"multipart/form-data", body, b"model") is None


def test_a_value_that_is_too_long_is_no_name() -> None:
    assert form_field(TYPE, whole(part(b'name="model"', b"m" * 257)), b"model") == ""
    longest = b"m" * MAX_VALUE_BYTES
    assert form_field(TYPE, whole(part(b'name="model"', longest)), b"model") == longest.decode()


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes(content_type: bytes, body: bytes) -> None:
    form_field(content_type, body, b"model")
    form_field(TYPE, b"--edge\r\n" + body, b"model")


@pytest.mark.parametrize(
    "unit",
    [
        b"content-disposition: form-data; name=model\r\n",
        b"--edge\r\n",
        b"--edge\r\n\r\n",
        b"\r\n--edg",
        b"\r\n",
    ],
)
def test_the_work_grows_with_the_form_at_most(unit: bytes) -> None:
    """Ten times the form, some ten times the work; the square would be a hundred."""

    def seconds(size: int) -> float:
        body = b"--edge\r\n" + unit * (size // len(unit))
        began = time.process_time()
        form_field(TYPE, body, b"model")
        return time.process_time() - began

    small = max(min(seconds(1_000_000) for _ in range(3)), 0.002)
    assert min(seconds(10_000_000) for _ in range(3)) < 40 * small
