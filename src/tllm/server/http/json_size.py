"""How deep a JSON text is nested, and how many objects and lists it has, before anything is made of it.

A body of 8 MiB can hold 2.8 million empty lists, which take twenty times that as objects, and brackets nested deeper
than a decoder can follow.
"""

from __future__ import annotations

import re

from tllm.server.http.errors import HttpError

# Texts and what is between them up to a bracket are one match, as there may be millions of texts. One that never ends
# goes to the end of the body: else each quote in it would be tried as a beginning anew.
_TEXTS = re.compile(rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)[^"\[\]{}]*+)++', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json_size(body: bytes, max_depth: int, max_containers: int) -> None:
    """HttpError for a body that is larger than this. One that is no JSON passes: decoding says what is wrong."""
    brackets = _TEXTS.sub(b"", body).translate(None, _NO_BRACKETS)
    containers = brackets.count(b"[") + brackets.count(b"{")
    if containers > max_containers:
        message = f"the body has {containers} objects and lists, at most {max_containers} are taken"
        raise HttpError(400, f"{message} (split the request)", code="json_too_large")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > max_depth:
            message = f"the body is nested {depth} deep or more, at most {max_depth} are taken"
            raise HttpError(400, f"{message} (give a flatter schema)", code="json_too_deep")
