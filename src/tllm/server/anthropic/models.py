"""The models of a server as Anthropic's interface lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tllm.server.openai.info import utc

VERSION = "anthropic-version"
"""The header by which requests are told from OpenAI's, which ask the same paths."""


def listed_models(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All in one page, of cards as `/v1/models` has them."""
    data = [model_info(card) for card in cards]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def model_info(card: dict[str, Any]) -> dict[str, Any]:
    """One model. The most that it may write is what its context holds."""
    most = card["max_model_len"]
    named = {"id": card["id"], "type": "model", "display_name": card["id"], "created_at": utc(card["created"])}
    return {**named, "max_input_tokens": most, "max_tokens": most}
