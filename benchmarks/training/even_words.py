"""The reward that `post_training` gives to completions, under every trainer: a function with TRL's signature."""

from __future__ import annotations

from typing import Any


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The part of a completion's tokens that have an even number."""
    return [sum(number % 2 == 0 for number in ids) / len(ids) for ids in completion_ids]
