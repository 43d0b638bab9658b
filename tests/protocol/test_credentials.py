"""Tests of the token of an `Authorization` header, in the forms that programs send."""

import base64

import pytest

from moorage.protocol.credentials import token_of


def basic(text: bytes) -> str:
    return f"Basic {base64.b64encode(text).decode()}"


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], (None, True)),
        (["Bearer secret"], ("secret", True)),
        (["bearer  secret "], ("secret", True)),
        ([basic(b"user:secret")], ("secret", True)),
        ([basic(b":secret")], ("secret", True)),
        ([basic(b"user:a:b").replace("Basic", "bAsIc")], ("a:b", True)),
        ([basic("user:geheim§".encode())], ("geheim§", True)),
    ],
)
def test_a_token_is_read_from_the_header(headers, found):
    assert token_of(headers) == found


@pytest.mark.parametrize(
    "headers",
    [
        ["Bearer"], ["Bearer "], ["secret"], [""], ["Digest x"], ["Basic"], ["Basic %%"],
        ["Basic secret"], [basic(b"secret")], [basic(b"user:")], [basic(b"user:\xff")],
        ["Bearer a", "Bearer a"], [basic(b"u:a"), "Bearer a"],
    ],
)  # fmt: skip
def test_an_empty_or_repeated_header_is_not_a_token(headers):
    assert token_of(headers)[1] is False
