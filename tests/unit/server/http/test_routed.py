"""What is said of a body that is no request."""

from __future__ import annotations

import pytest

from tllm.core.errors import RequestError
from tllm.server.http.routed import decode


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON: it is empty"),
        (b"\r\n", "not JSON: it is empty"),
        (b'{"a": ', "not JSON: Input data was truncated"),
    ],
)
def test_a_body_that_is_no_json(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        decode(body, dict[str, int])
