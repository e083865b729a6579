"""`CompletionRecord`: a completion for people to read, in a run's files, in TensorBoard and on the page. No torch."""

from __future__ import annotations

from typing import Any

import msgspec


class CompletionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A completion that step `step` learned from, or that was made after it and not learned; the first step is 1.

    `prompt` is a text or messages, as is `completion`, whose messages are its turns where tools may be called.
    `rewards` are by the function's name, None where it said nothing; `reference` is what the row itself has in the
    completion's place.
    """

    step: int
    prompt: Any
    completion: Any
    reference: str | None = None
    rewards: dict[str, float | None] | None = None
    reward: float | None = None
    advantage: float | None = None
    truncated: bool = False
