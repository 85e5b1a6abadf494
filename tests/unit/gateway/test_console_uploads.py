"""Forms with a file: what browsers send is read byte for byte, and what is broken is refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.console import uploads

TYPE = "multipart/form-data; boundary=----WebKitFormBoundaryX"
BOUNDARY = b"------WebKitFormBoundaryX"


def form(*parts: bytes) -> bytes:
    return b"".join(BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts) + BOUNDARY + b"--\r\n"


def a_file(content: bytes) -> bytes:
    head = b'Content-Disposition: form-data; name="logo"; filename="a.png"\r\nContent-Type: image/png'
    return head + b"\r\n\r\n" + content


@given(st.binary(max_size=200).filter(lambda content: BOUNDARY not in content))
def test_a_file_comes_as_it_was_sent(content: bytes) -> None:
    token = b'Content-Disposition: form-data; name="form_token"\r\n\r\nabc'
    assert uploads.fields(form(token, a_file(content)), TYPE) == [
        ("form_token", "abc"),
        ("logo", base64.b64encode(content).decode()),
    ]


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (form(a_file(b"x")), "multipart/form-data"),
        (form(a_file(b"x"))[:-6], TYPE),
        (b"", TYPE),
        (b"before" + form(a_file(b"x")), TYPE),
        (form(b"Content-Disposition: form-data\r\n\r\nx"), TYPE),
        (form(b'Content-Disposition: form-data; name="a"'), TYPE),
        (form(b'Content-Disposition: form-data; name="a"\r\n\r\n\xff'), TYPE),
        (form(*[a_file(b"")] * (uploads.MAX_PARTS + 1)), TYPE),
    ],
)
def test_what_is_broken_is_refused(data: bytes, content_type: str) -> None:
    with pytest.raises(ValueError, match=r"form|utf-8"):
        uploads.fields(data, content_type)


@given(st.binary(max_size=300), st.text(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes, content_type: str) -> None:
    for kind in (TYPE, content_type, "multipart/form-data; " + content_type):
        try:
            uploads.fields(data, kind)
        except ValueError:
            pass


@pytest.mark.parametrize("head", [b"form-data;" * 200_000, b'form-data; name="' * 100_000, b" " * 2_000_000])
def test_attack_F16_a_head_of_megabytes_is_refused_before_it_is_searched(head: bytes) -> None:
    """Its search took the square of its length: minutes for what anybody may send to the page of the sign-in."""
    with pytest.raises(ValueError, match="too long"):
        uploads.fields(form(b"Content-Disposition: " + head + b"\r\n\r\nx"), TYPE)
