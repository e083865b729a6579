"""What a server replies to token ids."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence


def completed(url: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The token ids of a greedy reply from a server, whose `url` ends with /v1."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    asked = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as reply:
        ids: list[int] = json.load(reply)["choices"][0]["token_ids"]
        return ids
