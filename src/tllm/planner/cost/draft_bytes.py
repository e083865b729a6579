"""Bytes of a draft model on the node of the first rank: its weights, and a cache for the target's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tllm.planner.cost.cache_room import DEFAULT_CACHE_BYTES
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class DraftBytes:
    """Bytes of a draft model's weights, and the pages and bytes of its cache."""

    weights: int
    pages: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def draft_bytes(spec: ModelSpec, dtype: str, pages: int, page_size: int) -> DraftBytes:
    """Beside a target whose cache has so many pages: as many, but DEFAULT_CACHE_BYTES at most."""
    (rank,) = rank_bytes(spec, Plan.parse("pp=1", spec.num_layers), dtype)
    page_bytes = rank.kv_per_token * page_size
    held = max(1, min(pages, DEFAULT_CACHE_BYTES // page_bytes))
    return DraftBytes(rank.weights, held, held * page_bytes)
