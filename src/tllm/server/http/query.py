"""Numbers in the query of a request."""

from __future__ import annotations

import re

from starlette.requests import Request as HttpRequest

from tllm.core.errors import RequestError


def number_of(http: HttpRequest, name: str) -> int:
    """A whole number of the query, -1 where it is not given. RequestError for anything else."""
    text = http.query_params.get(name, "-1")
    if not re.fullmatch(r"-1|\d{1,18}", text, re.ASCII):
        raise RequestError(f"{name} is {text[:50]!r}, it must be a whole number", param=name)
    return int(text)
